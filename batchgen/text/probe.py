"""Try a job's roles, tools and begun answer on its chat template, before any weights load.

The prompt renderer calls it for `validate` and for the engine worker. What fails for every row fails here,
once, with the setting to change; all of it in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchgen.text.chat_template import ChatTemplate
from batchgen.text.messages import Message
from batchgen.text.prompt_spec import PromptSpec
from batchgen.types import UsageError

_USER = {"role": "user", "content": "batchgen probes the user turn"}
_SYSTEM = {"role": "system", "content": "batchgen probes the system turn"}
_ANSWER = {"role": "assistant", "content": "batchgen probes the answer"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "batchgen_probes_tools",
        "description": "batchgen probes tools",
        "parameters": {"type": "object", "properties": {}},
    },
}
_SHOWN = 500


def chat_faults(spec: PromptSpec, template: ChatTemplate) -> Iterator[UsageError]:
    """Every setting that the chat template does not go along with."""
    plain = _refusal(template, [_USER])
    if plain is not None:
        yield UsageError(
            f"prompt.chat_template: the chat template cannot render a plain user turn ({plain}); "
            "give another in prompt.chat_template"
        )
        return
    if spec.system is not None and spec.system_fallback == "error":
        refusal = system_refusal(template)
        if refusal is not None:
            yield UsageError(
                f"prompt.system: the chat template refuses a system turn ({refusal}); "
                "set prompt.system_fallback: prepend_to_user"
            )
    if spec.assistant_prefix:
        refusal = _refusal(template, [_USER, _ANSWER], continue_final_message=True)
        if refusal is not None:
            yield UsageError(
                f"prompt.assistant_prefix: the chat template cannot leave an assistant turn open ({refusal})"
                "; remove it, or give another template in prompt.chat_template"
            )
    if spec.turns is not None:
        refusal = _refusal(template, [_USER, _ANSWER, _USER])
        if refusal is not None:
            yield UsageError(
                f"sampling.turns: the chat template cannot render a dialogue ({refusal}); "
                "remove it, or give another template in prompt.chat_template"
            )
    if spec.tools:
        yield from _tools_faults(spec, template)


def _tools_faults(spec: PromptSpec, template: ChatTemplate) -> Iterator[UsageError]:
    tools: Any = [_TOOL] if isinstance(spec.tools, str) else list(spec.tools or ())
    try:
        rendered = template.render([_USER], tools=tools)
    except Exception as error:
        yield UsageError(
            f"prompt.tools: the chat template cannot render these tools ({said(error)}); "
            "correct them, or give another template in prompt.chat_template"
        )
        return
    if rendered == template.render([_USER]):
        yield UsageError(
            "prompt.tools: the chat template leaves tools out, so this model would never hear of them; "
            "remove prompt.tools, give prompt.chat_template, or choose a model made for tools"
        )


def system_refusal(template: ChatTemplate) -> str | None:
    """Why a chat template has no system turn; None if it has one."""
    try:
        rendered = template.render([_SYSTEM, _USER])
    except Exception as error:
        return said(error)
    return None if _SYSTEM["content"] in rendered else "it leaves its text out"


def _refusal(
    template: ChatTemplate, turns: list[Message], *, continue_final_message: bool = False
) -> str | None:
    try:
        template.render(turns, continue_final_message=continue_final_message)
    except Exception as error:
        return said(error)
    return None


def said(error: Exception) -> str:
    """A template's own message; for an error of another kind its name too."""
    from jinja2 import TemplateError

    from batchgen.text.sandbox import TemplateLimit

    message = " ".join(str(error).split())[:_SHOWN]
    plain = type(error) in (TemplateError, TemplateLimit) or not message
    return (message or type(error).__name__) if plain else f"{type(error).__name__}: {message}"
