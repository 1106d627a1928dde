"""Control tokens spelled in a row's text stay text, and nothing else changes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_tokenizers import PARTS, byte_fallback, byte_level, metaspace, with_template

from batchgen.text.control_tokens import ControlTokens
from batchgen.text.prompt import PreparedRow, PromptRenderer, PromptSpec
from batchgen.types import ErrorClass, RowError

MAKERS = [byte_level, byte_fallback, lambda: byte_fallback("unigram"), metaspace]
PIECES = [
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<unk>",
    "<",
    ">",
    "h",
    " ",
    "ab",
    "你",
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def prepare(renderer: PromptRenderer, **columns) -> PreparedRow | RowError:
    return renderer.prepare_batch([(0, columns)], 10_000)[0]


def control_ids(tokenizer, ids: list[int]) -> list[int]:
    # A character that the tokenizer does not know is <unk> whoever wrote it.
    unknown = tokenizer.hf.unk_token_id
    return [token_id for token_id in ids if token_id in tokenizer.special_ids and token_id != unknown]


@pytest.mark.parametrize("make", MAKERS)
@given(text=texts)
def test_the_renamed_tokenizer_is_the_same_without_control_tokens(make, text):
    tokenizer = make()
    control = ControlTokens(tokenizer)
    assume(not control.find(text))
    assert control.encode_marked([(text, "\ufdd2")]) == tokenizer.encode_batch([text])


@pytest.mark.parametrize("make", MAKERS)
@given(text=texts)
def test_written_by_a_template_they_are_the_same_ids(make, text):
    tokenizer = make()
    assert ControlTokens(tokenizer).encode_marked([(text, "\ufdd2")]) == tokenizer.encode_batch([text])


@pytest.mark.parametrize("make", MAKERS)
@given(text=texts)
def test_marked_text_has_no_control_id_and_reads_the_same(make, text):
    tokenizer = make()
    control = ControlTokens(tokenizer)
    marker = control.marker_for(text)
    (ids,) = control.encode_marked([(control.mark(text, marker), marker)])
    assert control_ids(tokenizer, ids) == []
    if "�" not in tokenizer.decode(ids) and tokenizer.hf.unk_token_id not in ids:
        assert tokenizer.decode(ids).strip(" ") == text.strip(" ")


@given(rows=st.lists(texts.filter(bool), min_size=1, max_size=3))
def test_no_row_ends_its_turn(rows):
    tokenizer = byte_level()
    renderer = PromptRenderer(PromptSpec(sources=("prompt",)), tokenizer)
    for prepared in renderer.prepare_batch([(i, {"prompt": text}) for i, text in enumerate(rows)], 10_000):
        assert control_ids(tokenizer, prepared.token_ids) == control_ids(
            tokenizer, prepare(renderer, prompt="x").token_ids
        )


@given(parts=st.lists(texts, min_size=1, max_size=4))
def test_pieces_that_a_template_joins_make_no_control_token(parts):
    tokenizer = with_template(byte_level(), PARTS)
    message = {"role": "user", "content": [{"type": "text", "text": part} for part in parts]}
    prepared = prepare(PromptRenderer(PromptSpec(messages="m"), tokenizer), m=[message])
    assert len(control_ids(tokenizer, prepared.token_ids)) == 2

    spec = PromptSpec.from_dict({"mode": "completion", "user": "{{ a }}{{ b }}."})
    prepared = prepare(PromptRenderer(spec, byte_level()), a=parts[0], b=parts[-1])
    assert control_ids(tokenizer, prepared.token_ids) == []


def test_what_the_job_writes_is_a_control_token():
    tokenizer = byte_level()
    spec = PromptSpec.from_dict({"mode": "completion", "user": "<|im_start|>{{ a }}<|im_end|>"})
    ids = prepare(PromptRenderer(spec, tokenizer), a="x<|im_end|>").token_ids
    assert control_ids(tokenizer, ids) == [
        tokenizer.special_tokens[s] for s in ("<|im_start|>", "<|im_end|>")
    ]
    assert tokenizer.decode(ids) == "x<|im_end|>"


def test_rows_without_control_text_are_tokenized_as_ever():
    tokenizer = byte_level()
    prepared = prepare(
        PromptRenderer(PromptSpec(sources=("prompt",)), tokenizer), prompt="hello <think> world"
    )
    expected = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "hello <think> world"}], add_generation_prompt=True, return_dict=False
    )
    assert prepared.token_ids == expected


def test_text_around_an_escaped_token_stays_in_one_piece():
    tokenizer = byte_fallback()
    (ids,) = ControlTokens(tokenizer).encode_marked([("[INST] h<!s>w</s>", "!")])
    spelled = [tokenizer.token(token_id) for token_id in ids]
    assert spelled[-5:] == ["<", "s", ">", "w", "</s>"]


def test_policies_and_their_count():
    tokenizer = byte_level()
    text = "a<|im_end|>b<|im_end|>"

    def under(policy):
        spec = PromptSpec.from_dict({"special_tokens_in_content": policy})
        return prepare(PromptRenderer(spec, tokenizer), prompt=text)

    escaped, allowed, refused = under("escape"), under("allow"), under("error")
    assert escaped.control_tokens == allowed.control_tokens == 2
    assert "2 control tokens" in escaped.notes[0]
    assert "plain text" in escaped.notes[0]
    assert len(control_ids(tokenizer, allowed.token_ids)) == 2 + len(
        control_ids(tokenizer, escaped.token_ids)
    )
    assert refused.error_class is ErrorClass.INVALID_PARAM
    assert "<|im_end|>" in refused.message


def test_noncharacters_in_the_text_are_kept():
    tokenizer = byte_level()
    text = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>"
    prepared = prepare(PromptRenderer(PromptSpec(sources=("prompt",)), tokenizer), prompt=text)
    assert text in tokenizer.decode(prepared.token_ids)


def test_an_error_message_shows_no_marker():
    template = "{{ raise_exception('no: ' + messages[0].content) }}"
    renderer = PromptRenderer(PromptSpec(sources=("prompt",)), with_template(byte_level(), template))
    assert prepare(renderer, prompt="<|im_end|>").message.endswith("no: <|im_end|>")
