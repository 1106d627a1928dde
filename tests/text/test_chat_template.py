"""Chat templates: the same text as transformers renders, and a clock that stands still."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tiny_tokenizers import CHATML, INST, PARTS, byte_fallback, byte_level, with_template

from batchgen.text.chat_template import ChatTemplate
from batchgen.types import UsageError

NOON = datetime(2026, 2, 3, 12, 0)
# The manners of published templates: trimming, namespaces, loop controls, generation marks, tools, reasoning.
RICH = """
{%- set ns = namespace(first=true) %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + (message.reasoning_content or '') + content.strip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.name ~ '(' ~ (call.function.arguments | tojson(indent=2)) ~ ')' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- set ns.first = false %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"ü": [1, 2.5, None]}}}
USER = {"role": "user", "content": " hello  world\n"}
CHATS = {
    "one turn": [USER],
    "a dialogue": [USER, {"role": "assistant", "content": "\nwell"}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "x", "reasoning": "because "}],
    "calls": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}],
    "left out": [{"role": "skip", "content": "s"}, USER],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=list(CHATS))
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("source", [RICH, PARTS], ids=["rich", "parts"])
def test_the_same_text_as_transformers(chat: list[dict[str, Any]], tools: Any, source: str) -> None:
    kwargs = {"enable_thinking": False, "bos_token": "<B>"}
    tokenizer = with_template(byte_level(), source)
    expected = tokenizer.hf.apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
    )
    variables = {**tokenizer.template_variables, **kwargs}
    assert ChatTemplate(source, variables, NOON).render(chat, tools=tools) == expected


@pytest.mark.parametrize("begun", ["Sure: ", "Sure:", " Sure\n", "a", "user"])
@pytest.mark.parametrize("source", [CHATML, RICH, INST, TRIMMING], ids=["chatml", "rich", "inst", "trim"])
def test_the_same_begun_answer_as_transformers(source: str, begun: str) -> None:
    tokenizer = with_template(byte_fallback(), source)
    chat = [USER, {"role": "assistant", "content": begun}]
    expected = tokenizer.hf.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    template = ChatTemplate(source, tokenizer.template_variables, NOON)
    assert template.render(chat, continue_final_message=True) == expected
    assert chat[-1]["content"] == begun


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "{{ messages | length }}"],
)
def test_a_template_that_cannot_leave_a_turn_open(source: str) -> None:
    chat = [USER, {"role": "assistant", "content": "begun"}]
    with pytest.raises(ValueError, match=r"leaves the begun answer out|never reads"):
        ChatTemplate(source, {}, NOON).render(chat, continue_final_message=True)


def test_the_clock_stands_still() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {}, NOON)
    assert template.render([USER]) == "03 Feb 2026 12:00"


def test_two_templates_have_each_their_own_clock() -> None:
    source = "{{ strftime_now('%d') }}"
    one, other = ChatTemplate(source, {}, NOON), ChatTemplate(source, {}, datetime(2026, 2, 9))
    assert (one.render([USER]), other.render([USER])) == ("03", "09")


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nosuchfilter }}", "{{ messages | random }}"])
def test_a_template_that_is_none(source: str) -> None:
    with pytest.raises(UsageError, match=r"prompt\.chat_template: line 1 of the template: Template"):
        ChatTemplate(source, {}, NOON)


def test_a_template_that_runs_away() -> None:
    with pytest.raises(Exception, match="turns of loops"):
        ChatTemplate(
            "{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}", {}, NOON
        ).render([USER])
