"""A model's chat template: a conversation, its tools and what else the job says, as one text.

Used by the prompt renderer. The same text, character for character, as transformers'
`apply_chat_template(tokenize=False)`; but compiled once for all rows, in a sandbox with limits, and with a
clock that stands still for the whole job.
Source: https://huggingface.co/docs/transformers/chat_templating_writing, which says what a template may use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from batchgen.text.sandbox import LimitedEnvironment
from batchgen.types import UsageError

# What transformers puts behind a begun answer to find where the template went on after it.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: Jinja.
        variables: what it may read besides the conversation: special tokens, and what the job sets.
        now: what the template's `strftime_now` takes for the time.

    Raises:
        UsageError: the source is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime) -> None:
        self._source = source
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise UsageError(
                f"prompt.chat_template: line {error.lineno} of the template: {type(error).__name__}: "
                f"{(error.message or '').rstrip('.')}; correct it there"
            ) from error
        # Jinja copies it for every rendering, and would build it from a chain of dicts each time.
        self._template.globals = {
            **_ENVIRONMENT.globals,
            "strftime_now": now.strftime,
            "documents": None,
            **variables,
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        answers: bool = True,
    ) -> str:
        """The conversation as text.

        Args:
            messages: turns with `role` and mostly `content`, made of what JSON knows.
            tools: what the model may call; None for none.
            continue_final_message: leave the last turn open instead of opening an assistant's.
            answers: whether an answer is to come; else no turn is opened for it.

        Raises:
            Exception: whatever the template raises; ValueError where it does not show the turn to continue.
        """
        turns = [_with_reasoning(message) for message in messages]
        if continue_final_message:
            return self._continued(turns, tools)
        return self._render(turns, tools, add_generation_prompt=answers)

    def _render(self, turns: Any, tools: Any, *, add_generation_prompt: bool) -> str:
        _ENVIRONMENT.meter.begin()
        return self._template.render(messages=turns, tools=tools, add_generation_prompt=add_generation_prompt)

    def _continued(self, turns: list[dict[str, Any]], tools: Any) -> str:
        begun = turns[-1]["content"]
        if "content" not in self._source:
            raise ValueError("it never reads the content of a message")
        turns[-1] = {**turns[-1], "content": begun + _TAG}
        text = self._render(turns, tools, add_generation_prompt=False)
        tag = _TAG.strip()
        if begun.strip() not in text or tag not in text:
            raise ValueError("it leaves the begun answer out or changes it")
        place = text.rindex(tag)
        # A template that trims contents took the space behind the tag, and would have taken what is before.
        return text[:place] if text[place : place + len(_TAG)] == _TAG else text[:place].rstrip()


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under every name that templates read it by."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}` marks what a model learns in training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """`namespace()` without names that Python keeps to itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError(f"a name of a namespace cannot begin with an underscore, as {name!r} does")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would not like.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "dict": _dict, "namespace": _Namespace}
    environment.limit_filters()
    return environment


_ENVIRONMENT = _make_environment()
