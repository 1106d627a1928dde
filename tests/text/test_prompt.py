"""Rows to prompts: every way a row can hold one, and every way it can fail without touching another."""

import json
from datetime import datetime

import pyarrow as pa
import pytest
from tiny_tokenizers import CHATML, INST, byte_fallback, byte_level, with_template

from batchgen.text.prompt import PreparedRow, PromptRenderer, PromptSpec
from batchgen.types import ErrorClass, RowError, SamplingParams, UsageError

CHAT = [{"role": "user", "content": "hello"}]


def renderer(tokenizer=None, **section) -> PromptRenderer:
    return PromptRenderer(PromptSpec.from_dict(section), tokenizer or byte_level())


def prepare(subject: PromptRenderer, *rows: dict, max_model_len: int = 10_000) -> list:
    return subject.prepare_batch(list(enumerate(rows)), max_model_len)


def text_of(subject: PromptRenderer, row: dict) -> str:
    explained = subject.explain(row)
    assert explained.error is None, explained.error
    return explained.text


def error_of(subject: PromptRenderer, row: dict) -> tuple[ErrorClass, str]:
    (error,) = prepare(subject, row)
    assert isinstance(error, RowError)
    assert subject.explain(row).error == error
    return error.error_class, error.message


def chatml(*turns: tuple[str, str], end: str = "<|im_start|>assistant\n") -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + end


def test_columns_found_by_name():
    subject = renderer()
    expected = chatml(("user", "hello"))
    assert text_of(subject, {"messages": CHAT, "prompt": "other"}) == expected
    assert text_of(subject, {"prompt": "hello"}) == expected
    assert text_of(subject, {"prompt": CHAT}) == expected


def test_settings_win_over_names():
    row = {"messages": CHAT, "prompt": "other", "chat": [{"role": "user", "content": "chat"}], "body": "text"}
    assert text_of(renderer(messages="chat"), row) == chatml(("user", "chat"))
    assert text_of(renderer(user="{{ body }}!"), row) == chatml(("user", "text!"))


def test_binding_settles_the_column():
    spec = PromptSpec.from_dict({})
    assert spec.required_columns() == {"messages", "prompt"}
    assert spec.bind(["id", "prompt"]).required_columns() == {"prompt"}
    assert PromptSpec.from_dict(spec.bind(["prompt"]).to_dict()).sources == ("prompt",)
    with pytest.raises(UsageError, match=r"no column 'messages' or 'prompt'.*it has 'text'.*prompt\.user"):
        spec.bind(["text"])


def test_required_columns_of_templates():
    spec = PromptSpec.from_dict(
        {"system": "{{ lang }}", "user": "{% for x in items %}{{ x }}{{ range(2) }}{% endfor %}"}
    )
    assert spec.required_columns() == {"lang", "items"}
    with pytest.raises(
        UsageError, match=r"prompt.user: the input has no column 'items'; did you mean 'item'"
    ):
        spec.bind(["lang", "item"])


def test_completion_is_the_text_itself():
    assert text_of(renderer(mode="completion"), {"prompt": " hello"}) == " hello"
    assert text_of(renderer(mode="completion", user="Q: {{ q }}\n"), {"q": 1}) == "Q: 1\n"


def test_tokens_are_taken_as_they_are():
    (prepared,) = prepare(renderer(byte_fallback(), mode="tokens"), {"prompt_token_ids": [5, 6]})
    assert prepared == PreparedRow(0, [5, 6])


@pytest.mark.parametrize("ids", [[1, 10**6], [-1], [1.0], [True], ["1"], "12", 3])
def test_bad_token_ids(ids):
    assert error_of(renderer(mode="tokens"), {"prompt": ids})[0] is ErrorClass.INVALID_PARAM


def test_no_token_ids():
    assert error_of(renderer(mode="tokens"), {"prompt": []})[0] is ErrorClass.EMPTY_PROMPT


def test_arrow_nulls_are_dropped_at_every_depth():
    plain = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}], "content": ""},
        {"role": "tool", "content": "r", "name": "f"},
    ]
    extra = [*plain[:2], {**plain[2], "tool_calls": [{"name": "f", "arguments": {"y": 2}}]}]
    (arrow, _) = pa.table({"messages": [plain, extra]}).column("messages").to_pylist()
    assert arrow != plain
    seen = with_template(byte_level(), "{{ messages | tojson(sort_keys=true) }}")
    assert text_of(renderer(seen), {"messages": arrow}) == text_of(renderer(seen), {"messages": plain})
    assert text_of(renderer(seen), {"messages": json.dumps(plain)}) == text_of(
        renderer(seen), {"messages": plain}
    )


@pytest.mark.parametrize(
    ("value", "error_class"),
    [
        (None, ErrorClass.NULL_PROMPT),
        ("null", ErrorClass.NULL_PROMPT),
        ([], ErrorClass.EMPTY_PROMPT),
        ("", ErrorClass.EMPTY_PROMPT),
        ("[]", ErrorClass.EMPTY_PROMPT),
        ("[{", ErrorClass.INVALID_JSON),
        ("[" * 100_000, ErrorClass.INVALID_JSON),
        ("[" + "1" * 5000 + "]", ErrorClass.INVALID_JSON),
        ("[NaN]", ErrorClass.INVALID_JSON),
        (7, ErrorClass.INVALID_PARAM),
        ('{"role": "user"}', ErrorClass.INVALID_PARAM),
        (["hi"], ErrorClass.INVALID_PARAM),
        ([{"content": "hi"}], ErrorClass.INVALID_PARAM),
        ([{"role": None, "content": "hi"}], ErrorClass.INVALID_PARAM),
        ([{"role": "user", "content": None}], ErrorClass.NULL_PROMPT),
        ('[{"role": "user", "content": "\\ud83d"}]', ErrorClass.INVALID_UNICODE),
    ],
)
def test_messages_that_are_none(value, error_class):
    found, message = error_of(renderer(), {"messages": value})
    assert found is error_class
    assert error_class is ErrorClass.INVALID_UNICODE or "'messages'" in message


def test_null_and_empty_prompts():
    results = prepare(renderer(), *({"prompt": text} for text in ["hi", None, "", "   "]))
    assert [type(r) for r in results] == [PreparedRow, RowError, RowError, PreparedRow]
    assert [r.error_class for r in results[1:3]] == [ErrorClass.NULL_PROMPT, ErrorClass.EMPTY_PROMPT]
    assert [r.row for r in results if isinstance(r, PreparedRow)] == [0, 3]


def test_a_missing_column_is_named():
    subject = renderer(user="{{ title }}: {{ body }}")
    assert error_of(subject, {"title": "t"}) == (
        ErrorClass.MISSING_COLUMN,
        "prompt.user: the row has no column 'body'",
    )
    assert error_of(renderer(), {"text": "t"})[0] is ErrorClass.MISSING_COLUMN
    assert error_of(renderer(user="{{ a.b }}"), {"a": {}})[0] is ErrorClass.MISSING_COLUMN
    assert text_of(renderer(user="{{ a if a is defined else 'x' }}"), {}) == chatml(("user", "x"))


def test_a_null_is_not_the_word_none():
    error_class, message = error_of(renderer(user="{{ title }}"), {"title": None})
    assert error_class is ErrorClass.NULL_PROMPT
    assert "'title' is null" in message
    assert text_of(renderer(user="x{{ title or '' }}"), {"title": None}) == chatml(("user", "x"))


def test_values_that_are_no_text():
    assert error_of(renderer(user="{{ b }}"), {"b": b"raw"})[0] is ErrorClass.TEMPLATE
    error_class, message = error_of(renderer(), {"prompt": 5})
    assert error_class is ErrorClass.INVALID_PARAM
    assert "prompt.user: '{{ prompt }}'" in message


def test_templates_run_in_a_sandbox():
    assert error_of(renderer(user="{{ ''.__class__.__mro__ }}"), {})[0] is not None
    assert error_of(renderer(user="{{ items.append(1) }}"), {"items": []})[0] is ErrorClass.TEMPLATE
    assert error_of(renderer(user="{{ 1 // n }}"), {"n": 0})[0] is ErrorClass.TEMPLATE
    assert error_of(renderer(user="{% if false %}x{% endif %}"), {})[0] is ErrorClass.EMPTY_PROMPT


def test_templates_keep_their_line_breaks():
    assert text_of(renderer(mode="completion", user="a\n\n{{ b }}\n"), {"b": "\n"}) == "a\n\n\n\n"


def test_the_chat_templates_own_words():
    row = {"messages": [{"role": "system", "content": "s"}, *CHAT]}
    error_class, message = error_of(renderer(byte_fallback()), row)
    assert (error_class, message) == (
        ErrorClass.TEMPLATE,
        "the chat template failed: System role not supported",
    )


def test_a_lone_surrogate():
    error_class, message = error_of(renderer(mode="completion"), {"prompt": "ok \ud83d"})
    assert error_class is ErrorClass.INVALID_UNICODE
    assert "\\ud83d at character 3" in message


def test_a_text_that_the_tokenizer_refuses(monkeypatch):
    tokenizer = with_template(byte_level(), CHATML)
    encode = tokenizer.encode_batch

    def refusing(texts):
        if any("bad" in text for text in texts):
            raise ValueError("cannot")
        return encode(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", refusing)
    good, bad, also_good = prepare(renderer(tokenizer), {"prompt": "a"}, {"prompt": "bad"}, {"prompt": "b"})
    assert isinstance(bad, RowError)
    assert bad.error_class == ErrorClass.INTERNAL
    assert bad.message.startswith("the tokenizer refused the prompt: ValueError: cannot; correct the row")
    assert isinstance(good, PreparedRow)
    assert isinstance(also_good, PreparedRow)


def test_prompts_that_are_too_long():
    subject = renderer(mode="completion")
    results = prepare(subject, *({"prompt": "x" * n} for n in (7, 8, 80)), max_model_len=8)
    assert isinstance(results[0], PreparedRow)
    assert [r.error_class for r in results[1:]] == [ErrorClass.CONTEXT_LENGTH] * 2
    assert "80 tokens" in results[2].message
    assert "max_model_len" in results[2].message


def test_a_batch_is_its_rows():
    subject = renderer(user="{{ a }}")
    rows = [{"a": "x" * n + "<|im_end|>" * (n % 2)} for n in range(300)] + [{}]
    together = prepare(subject, *rows)
    alone = prepare(subject, rows[299])[0]
    assert together[299] == alone._replace(row=299)
    assert together[299].control_tokens == 1
    assert [r if isinstance(r, RowError) else r.token_ids for r in together] == [
        r if isinstance(r, RowError) else r.token_ids for row in rows for r in prepare(subject, row)
    ]


def test_system_turn():
    subject = renderer(system="Be {{ mood }}.", user="{{ q }}")
    assert text_of(subject, {"mood": "brief", "q": "hi"}) == chatml(("system", "Be brief."), ("user", "hi"))
    assert text_of(renderer(system=""), {"prompt": "hi"}) == chatml(("system", ""), ("user", "hi"))


def test_a_rows_own_system_turn():
    row = {"messages": [{"role": "system", "content": "s"}, *CHAT]}
    assert text_of(renderer(), row) == chatml(("system", "s"), ("user", "hello"))
    error_class, message = error_of(renderer(system="job's"), row)
    assert error_class is ErrorClass.TEMPLATE
    assert "prompt.system" in message


def test_system_prepended_to_the_user_turn():
    subject = renderer(byte_fallback(), system="S", system_fallback="prepend_to_user")
    subject.probe()
    assert text_of(subject, {"prompt": "hello"}) == "<s>[INST] S\n\nhello [/INST]"
    own = {"messages": [{"role": "system", "content": "own"}, *CHAT]}
    row_system = renderer(byte_fallback(), system_fallback="prepend_to_user")
    assert text_of(row_system, own) == "<s>[INST] own\n\nhello [/INST]"
    alone = {"messages": own["messages"][:1]}
    assert error_of(row_system, alone)[0] is ErrorClass.TEMPLATE
    # A template with a system turn of its own keeps it.
    kept = renderer(system="S", system_fallback="prepend_to_user")
    assert text_of(kept, {"prompt": "h"}) == chatml(("system", "S"), ("user", "h"))


def test_system_prepended_to_a_turn_in_parts():
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    subject = renderer(with_template(byte_level(), template), system="S", system_fallback="prepend_to_user")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of(subject, {"messages": [{"role": "user", "content": parts}]}) == "S\n\nab"


def test_assistant_prefix_continues_the_final_message():
    subject = renderer(assistant_prefix="Answer {{ n }}: ")
    subject.probe()
    assert text_of(subject, {"prompt": "hi", "n": 1}) == chatml(
        ("user", "hi"), end="<|im_start|>assistant\nAnswer 1: "
    )
    ends = {"messages": [*CHAT, {"role": "assistant", "content": "x"}], "n": 1}
    assert error_of(subject, ends)[0] is ErrorClass.TEMPLATE


def test_a_template_that_writes_bos_gets_no_second():
    tokenizer = byte_fallback()
    (prepared,) = prepare(renderer(tokenizer), {"prompt": "hello"})
    assert prepared.token_ids.count(tokenizer.bos_token_id) == 1
    assert prepared.token_ids == tokenizer.hf.apply_chat_template(CHAT, return_dict=False)


@pytest.mark.parametrize("policy", ["escape", "allow"])
def test_completion_has_one_leading_bos(policy):
    tokenizer = byte_fallback()
    subject = renderer(tokenizer, mode="completion", special_tokens_in_content=policy)
    plain, begun = prepare(subject, {"prompt": "hello"}, {"prompt": "<s>hello"})
    assert plain.token_ids == tokenizer.hf("hello").input_ids
    assert begun.token_ids == plain.token_ids
    (twice,) = prepare(subject, {"prompt": "<s><s>hello"})
    assert twice.token_ids.count(1) == (2 if policy == "allow" else 1)


def test_bos_inside_is_left_alone():
    tokenizer = with_template(byte_level(), CHATML.replace("<|im_end|>", "<|endoftext|>"))
    (prepared,) = prepare(renderer(tokenizer), {"messages": CHAT * 2})
    assert prepared.token_ids.count(tokenizer.bos_token_id) == 2


def test_probe_without_a_chat_template():
    base = with_template(byte_level(), None)
    with pytest.raises(UsageError, match=r"prompt\.mode: completion"):
        renderer(base).probe()
    renderer(base, mode="completion").probe(["prompt"])
    renderer(base, chat_template=CHATML).probe()


def test_probe_of_a_template_without_system_turn():
    with pytest.raises(UsageError, match=r"System role not supported.*prepend_to_user"):
        renderer(byte_fallback(), system="S").probe()
    silent = with_template(
        byte_level(), "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UsageError, match="leaves its text out"):
        renderer(silent, system="S").probe()


def test_probe_of_broken_templates():
    user_only = "{% for m in messages if m.role == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UsageError, match=r"prompt\.chat_template: .*plain user turn"):
        renderer(chat_template="{{ nothing.there }}").probe()
    with pytest.raises(UsageError, match=r"prompt\.chat_template: .*TemplateSyntaxError"):
        renderer(chat_template="{% for %}").probe()
    with pytest.raises(UsageError, match=r"prompt\.user: line 2"):
        renderer(user="\n{{ a")
    with pytest.raises(UsageError, match=r"prompt\.assistant_prefix: "):
        renderer(chat_template=user_only, assistant_prefix="A").probe()
    with pytest.raises(UsageError, match="no column"):
        renderer().probe(["text"])


def test_probe_finds_everything_at_once():
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    subject = renderer(chat_template=silent, system="S", assistant_prefix="A", tools="t")
    faults = [str(fault).partition(":")[0] for fault in subject.faults()]
    assert faults == ["prompt.system", "prompt.assistant_prefix", "prompt.tools"]
    with pytest.raises(UsageError, match=r"(?s)prompt\.system.*prompt\.tools: .*leaves tools out"):
        subject.probe()
    strict = "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    dialogue = renderer(chat_template=strict + silent, turns="turns")
    assert [str(fault) for fault in dialogue.faults()] == [
        "sampling.turns: the chat template cannot render a dialogue (one turn only); "
        "remove it, or give another template in prompt.chat_template"
    ]


TOOLS = [{"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}]
WITH_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}|{% endif %}" + CHATML


def test_tools_as_stored():
    shown = '{"type": "function", "function": {"name": "f", "parameters": {}}}|'
    subject = renderer(chat_template=WITH_TOOLS, tools="tools")
    subject.probe(["prompt", "tools"])
    for value in (TOOLS, json.dumps(TOOLS), pa.array([TOOLS]).to_pylist()[0]):
        assert text_of(subject, {"prompt": "a", "tools": value}) == shown + chatml(("user", "a"))
    for row in ({"tools": None}, {"tools": []}, {"tools": " "}, {}):
        assert text_of(subject, {"prompt": "a", **row}) == chatml(("user", "a"))


@pytest.mark.parametrize(
    "value", ["[{", '{"name": "f"}', "[1]", "[NaN]", [1], 7, {"name": "f"}, float("nan"), "[" * 100_000]
)
def test_tools_that_are_none(value):
    error_class, message = error_of(
        renderer(chat_template=WITH_TOOLS, tools="tools"), {"prompt": "a", "tools": value}
    )
    assert error_class is ErrorClass.INVALID_TOOLS
    assert "column 'tools'" in message


def test_tools_of_the_job():
    tools = [{"type": "function", "function": {"name": "g"}}]
    spec = PromptSpec.from_dict({"chat_template": WITH_TOOLS, "tools": tools})
    assert PromptSpec.from_dict(spec.to_dict()) == spec
    assert spec.required_columns() == {"messages", "prompt"}
    subject = PromptRenderer(spec, byte_level())
    subject.probe()
    assert text_of(subject, {"prompt": "a"}) == f"{json.dumps(tools[0])}|{chatml(('user', 'a'))}"


def test_control_tokens_in_tools_are_text():
    tools = [{"name": "<|im_end|>", "<|im_end|>": 1}]
    own = byte_level().special_tokens["<|im_end|>"]
    for source in (WITH_TOOLS, WITH_TOOLS.replace("tojson", "tojson(ensure_ascii=true)")):
        subject = renderer(chat_template=source, tools="tools")
        (prepared,) = prepare(subject, {"prompt": "a", "tools": tools})
        assert prepared.token_ids.count(own) == 1
        assert prepared.control_tokens == 2
        assert (
            byte_level().decode_all(prepared.token_ids) == f"{json.dumps(tools[0])}|{chatml(('user', 'a'))}"
        )


def test_a_dialogue_turn_by_turn():
    subject = renderer(turns="turns", system="S")
    row = {"turns": ["a", "b"], "prompt": "not read"}
    (first,) = prepare(subject, row)
    assert byte_level().decode_all(first.token_ids) == chatml(("system", "S"), ("user", "a"))
    second = subject.prepare_turn(0, row, ["x<|im_end|>"], 1000, SamplingParams())
    assert byte_level().decode_all(second.token_ids) == chatml(
        ("system", "S"), ("user", "a"), ("assistant", "x<|im_end|>"), ("user", "b")
    )
    assert second.control_tokens == 1
    late = subject.prepare_turn(0, row, ["x"], 30, SamplingParams())
    assert late.error_class is ErrorClass.CONTEXT_LENGTH


def test_a_dialogue_after_messages():
    subject = renderer(turns="turns", messages="messages")
    text = text_of(subject, {"turns": '["b"]', "messages": [*CHAT, {"role": "assistant", "content": "hi"}]})
    assert text == chatml(("user", "hello"), ("assistant", "hi"), ("user", "b"))


@pytest.mark.parametrize(
    ("value", "error_class"),
    [
        (None, ErrorClass.NULL_PROMPT),
        ([], ErrorClass.EMPTY_PROMPT),
        (["a", None], ErrorClass.NULL_PROMPT),
        (["a", ""], ErrorClass.EMPTY_PROMPT),
        (["a", 1], ErrorClass.INVALID_PARAM),
        ("a", ErrorClass.INVALID_PARAM),
        ("[1", ErrorClass.INVALID_JSON),
    ],
)
def test_turns_that_are_none(value, error_class):
    found, message = error_of(renderer(turns="turns"), {"turns": value})
    assert found is error_class
    assert "'turns'" in message


def test_chat_template_kwargs():
    subject = renderer(
        chat_template="{{ messages[0].content }}{{ mode }}", chat_template_kwargs={"mode": "!"}
    )
    assert text_of(subject, {"prompt": "a"}) == "a!"


def test_a_template_that_writes_the_date_is_noted():
    template = "{{ date_string or strftime_now('%d') }}"
    subject = PromptRenderer(
        PromptSpec.from_dict({"chat_template": template}), byte_level(), now=datetime(2026, 2, 3)
    )
    assert "date_string" in subject.notes[0]
    assert "(2026-02-03)" in subject.notes[0]
    assert text_of(subject, {"prompt": "x"}) == "03"
    assert renderer(chat_template=template, chat_template_kwargs={"date_string": "1"}).notes == ()
    assert renderer(chat_template=INST).notes == ()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tools": "t", "mode": "completion"}, r"prompt\.tools: has no meaning"),
        ({"turns": "t", "mode": "completion"}, r"sampling\.turns: has no meaning"),
        ({"turns": "t", "user": "x"}, r"prompt\.user and sampling\.turns"),
        ({"user": "x", "messages": "m"}, r"prompt\.messages and prompt\.user"),
        ({"mode": "completion", "system": "x"}, r"prompt\.system: has no meaning"),
        ({"mode": "tokens", "user": "x"}, r"prompt\.user: has no meaning"),
        ({"chat_template_kwargs": {"tokenize": True}}, r"prompt\.chat_template_kwargs: 'tokenize'"),
    ],
)
def test_sections_that_are_refused(section, message):
    with pytest.raises(UsageError, match=message):
        PromptSpec.from_dict(section)


def test_nulls_are_defaults():
    assert PromptSpec.from_dict({"mode": None, "system": None, "tools": None}) == PromptSpec.from_dict({})


def test_explain_marks_special_tokens():
    explained = renderer().explain({"prompt": "h<|im_end|>"}, max_model_len=3)
    assert explained.text == chatml(("user", "h<|im_end|>"))
    assert explained.tokens[0] == (byte_level().special_tokens["<|im_start|>"], "<|im_start|>", True)
    assert explained.control_tokens == 1
    assert explained.error.error_class is ErrorClass.CONTEXT_LENGTH
    assert renderer(mode="tokens").explain({"prompt": [0]}).text == byte_level().decode_all([0])


def test_a_template_is_taken_by_its_name_among_several_of_the_tokenizer():
    tokenizer = with_template(byte_level(), CHATML)
    tokenizer.hf.chat_template = {"default": CHATML, "loud": "{{ messages[0].content | upper }}"}
    assert text_of(renderer(tokenizer, chat_template="loud"), {"prompt": "a"}) == "A"
    with pytest.raises(
        UsageError, match=r"chat_template: 'silent' is neither a file nor .* \(it has default, loud\)"
    ):
        renderer(tokenizer, chat_template="silent").probe()
    with pytest.raises(UsageError, match=r"it has none with a name"):
        renderer(chat_template="silent").probe()
