"""Where a text is split into reasoning and answer; marks may be text or special tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from batchgen.text.reasoning import ReasoningSplitter
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Reasoning

TEXT = Reasoning()
SPECIAL = Reasoning("<|im_start|>", "<|endoftext|>")
CHAT = "<|im_start|>user\nwhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n"


def split(prompt: str, text: str, marks: Reasoning = TEXT) -> tuple[str | None, str]:
    tokenizer = byte_level()
    ids = tokenizer.encode_batch([text])[0]
    given_ids = tokenizer.encode_batch([prompt])[0]
    return ReasoningSplitter(marks, tokenizer).split(given_ids, ids, tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (CHAT, "<think>\nwhy\n</think>\n\nso", ("why", "so")),
        (CHAT, " \n<think></think>so ", ("", "so ")),
        (CHAT, "<think>without end", ("without end", "")),
        (CHAT, "<think>a</think>the mark </think> ends", ("a", "the mark </think> ends")),
        (CHAT, "so", (None, "so")),
        (CHAT, " The <think> mark</think>", (None, " The <think> mark</think>")),
        (CHAT + "<think>\n", "why\n</think>\n\nso", ("why", "so")),
        (CHAT + "<think>\n", "<think>why</think>so", ("why", "so")),
        (CHAT + "<think>\n", "cut off", ("cut off", "")),
        (CHAT + "<think>\n", "", ("", "")),
        (CHAT + "<think>\nFirst,", " why</think>so", ("why", "so")),
        (CHAT + "<think>\n\n</think>\n\n", "the <think> mark", (None, "the <think> mark")),
        ("text that <think> ends open", " x</think>so", ("x", "so")),
    ],
)
def test_split(prompt: str, text: str, expected: tuple[str | None, str]) -> None:
    assert split(prompt, text) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("x<|im_end|>", "<|im_start|>why <|endoftext|> so", ("why", "so")),
        ("x<|im_end|><|im_start|>", "why<|endoftext|>so", ("why", "so")),
        ("x<|im_end|><|im_start|>y<|endoftext|>", "so", (None, "so")),
        ("x<|im_end|>", "so", (None, "so")),
    ],
)
def test_marks_that_are_special_tokens(prompt: str, text: str, expected: tuple[str | None, str]) -> None:
    assert split(prompt, text, SPECIAL) == expected


def test_marks_that_are_special_tokens_where_a_stop_string_cut_a_token() -> None:
    tokenizer: Tokenizer = byte_level()
    ids = tokenizer.encode_batch(["<|im_start|>why<|endoftext|>hello"])[0]
    # "hello" is one token, and "lo" the stop string.
    assert ReasoningSplitter(SPECIAL, tokenizer).split([1], ids, "whyhel") == ("why", "hel")


words = st.text(alphabet="ab <>\n/th", max_size=12)


@given(words, words, st.booleans())
def test_nothing_but_marks_and_space_is_lost(reasoning: str, answer: str, opened: bool) -> None:
    text = f"{reasoning}</think>{answer}"
    found = split(CHAT + "<think>" if opened else CHAT, text if opened else f"<think>{text}")
    assert found == (reasoning.strip(), answer.lstrip())


def test_marks_that_are_empty() -> None:
    with pytest.raises(ValueError, match=r"sampling\.reasoning: an empty mark is not allowed"):
        Reasoning("", "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>why</think> so", "<think>why</think>"),
        ("<think>why</think> so </think>", "<think>why</think>"),
        ("<think>without end", "<think>without end"),
        ("", ""),
    ],
)
def test_tokens_up_to_the_end_mark_are_the_reasonings(text: str, expected: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_batch([text])[0]
    count = ReasoningSplitter(TEXT, tokenizer).num_tokens(ids)
    covered = tokenizer.decode(ids[:count])
    assert covered.startswith(expected)
    assert count == 0 or len(tokenizer.decode(ids[: count - 1])) < len(expected)


def test_a_special_end_mark_is_the_last_token_of_the_reasoning() -> None:
    tokenizer: Tokenizer = byte_level()
    ids = tokenizer.encode_batch(["<|im_start|>why<|endoftext|>hello"])[0]
    count = ReasoningSplitter(SPECIAL, tokenizer).num_tokens(ids)
    assert ids[count - 1] == tokenizer.special_tokens["<|endoftext|>"]
