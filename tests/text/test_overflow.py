"""Prompts that do not fit: refused, left out, or made of a shorter text, with all else whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, byte_fallback, byte_level, with_template

from batchgen.text.overflow import cut
from batchgen.text.prompt import PreparedRow, PromptRenderer, PromptSpec
from batchgen.types import ErrorClass, RowError, SamplingParams, Status

POLICIES = ("truncate_left", "truncate_right", "truncate_middle")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def prepare(
    row: dict[str, Any],
    context: int,
    sampling: SamplingParams | None = None,
    tokenizer: Any = None,
    **section: Any,
) -> Any:
    subject = PromptRenderer(PromptSpec.from_dict(section), tokenizer or byte_level())
    sampled = SamplingParams(max_tokens=8) if sampling is None else sampling
    (prepared,) = subject.prepare_batch([(0, row)], context, [sampled])
    explained = subject.explain(row, context, sampled)
    if isinstance(prepared, PreparedRow):
        assert [i for i, _, _ in explained.tokens] == prepared.token_ids
        assert explained.truncated_tokens == prepared.truncated_tokens
    else:
        assert explained.error == prepared
    return prepared


def text(prepared: PreparedRow, tokenizer: Any = None) -> str:
    return (tokenizer or byte_level()).decode_all(prepared.token_ids)


@pytest.mark.parametrize(
    ("policy", "left"),
    [("truncate_left", "cdef"), ("truncate_right", "abcd"), ("truncate_middle", "abef")],
)
def test_where_it_is_cut(policy: str, left: str) -> None:
    assert cut("abcdef", 2, policy) == left
    assert cut(list("abcdef"), 2, policy) == list(left)
    assert cut("abcde", 5, policy) == ""
    assert cut("abcde", 0, policy) == "abcde"


@pytest.mark.parametrize(("policy", "kept"), [
    ("truncate_left", LETTERS[-16:]),
    ("truncate_right", LETTERS[:16]),
    ("truncate_middle", LETTERS[:8] + LETTERS[-8:]),
])  # fmt: skip
def test_a_plain_prompt(policy: str, kept: str) -> None:
    prepared = prepare({"prompt": LETTERS}, 24, mode="completion", overflow=policy)
    assert text(prepared) == kept
    assert prepared.truncated_tokens == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_bos_and_the_templates_words_stay(policy: str) -> None:
    tokenizer = byte_fallback()
    prepared = prepare({"prompt": "hello " * 50}, 30, tokenizer=tokenizer, overflow=policy)
    assert prepared.token_ids[0] == tokenizer.bos_token_id
    shown = text(prepared, tokenizer)
    assert shown.startswith("<s> [INST] ")
    assert shown.endswith(" [/INST]")
    whole = prepare({"prompt": "hello " * 50}, 10_000, tokenizer=tokenizer)
    assert len(prepared.token_ids) + prepared.truncated_tokens == len(whole.token_ids)
    assert len(prepared.token_ids) <= 22
    plain = prepare({"prompt": "hello " * 50}, 30, tokenizer=tokenizer, mode="completion", overflow=policy)
    assert (plain.token_ids[0], len(plain.token_ids)) == (tokenizer.bos_token_id, 22)


def test_the_jobs_own_words_stay() -> None:
    section = {"mode": "completion", "user": "Q: {{ q }} A:", "overflow": "truncate_left"}
    assert text(prepare({"q": LETTERS}, 18, **section)) == "Q: wxyz A:"


def test_the_longest_user_turn_goes_first() -> None:
    chat = [
        {"role": "system", "content": "s" * 30},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "a" * 40},
        {"role": "user", "content": LETTERS},
    ]
    whole = prepare({"messages": chat}, 1000)
    prepared = prepare({"messages": chat}, len(whole.token_ids), overflow="truncate_right")
    assert prepared.truncated_tokens == 8
    assert text(prepared) == text(whole).replace(LETTERS, LETTERS[:18])
    # All of both user turns must go, and of the answer some.
    prepared = prepare({"messages": chat}, len(whole.token_ids) - 26 - 5 - 3, overflow="truncate_right")
    assert text(prepared) == text(whole).replace(LETTERS, "").replace("first", "").replace("a" * 40, "a" * 29)


def test_of_equal_turns_the_last_goes_first() -> None:
    chat = [{"role": "user", "content": LETTERS}, {"role": "user", "content": LETTERS}]
    whole = prepare({"messages": chat}, 1000)
    prepared = prepare({"messages": chat}, len(whole.token_ids), overflow="truncate_left")
    assert text(prepared).index(LETTERS) < text(prepared).index(LETTERS[8:] + "<|im_end|>", 50)


def test_ids_are_cut_behind_their_bos() -> None:
    bos = byte_level().bos_token_id
    ids = [bos, *range(20)]
    prepared = prepare({"prompt": ids}, 16, mode="tokens", overflow="truncate_left")
    assert prepared.token_ids == [bos, *range(13, 20)]
    assert prepared.truncated_tokens == 13
    prepared = prepare({"prompt": ids[1:]}, 16, mode="tokens", overflow="truncate_middle")
    assert prepared.token_ids == [0, 1, 2, 3, 16, 17, 18, 19]


def test_skipped_is_no_error() -> None:
    skipped = prepare({"prompt": LETTERS}, 20, mode="completion", overflow="skip")
    assert isinstance(skipped, RowError)
    assert (skipped.status, skipped.error_class) == (Status.SKIPPED, ErrorClass.CONTEXT_LENGTH)
    assert "26 tokens" in skipped.message


@pytest.mark.parametrize("policy", [*POLICIES, "skip", "error"])
def test_the_longest_prompt_that_fits_is_left_alone(policy: str) -> None:
    exact = prepare({"prompt": LETTERS}, 27, mode="completion", overflow=policy)
    assert (text(exact), exact.truncated_tokens) == (LETTERS, 0)


def test_room_for_min_tokens() -> None:
    sampling = SamplingParams(min_tokens=4, max_tokens=5)
    section: dict[str, Any] = {"mode": "completion"}
    assert text(prepare({"prompt": LETTERS}, 30, sampling, **section)) == LETTERS
    refused = prepare({"prompt": LETTERS}, 29, sampling, **section)
    assert refused.error_class is ErrorClass.CONTEXT_LENGTH
    assert "at least 4 of them (sampling.min_tokens)" in refused.message
    kept = prepare({"prompt": LETTERS}, 29, sampling, **section, overflow="truncate_right")
    assert text(kept) == LETTERS[:24]


def test_an_answer_gets_at_most_half_of_the_context() -> None:
    sampling = SamplingParams(max_tokens=1000)
    kept = prepare({"prompt": LETTERS}, 20, sampling, mode="completion", overflow="truncate_right")
    assert text(kept) == LETTERS[:10]


@pytest.mark.parametrize(
    "section", [{}, {"user": "{{ prompt }}"}, {"system": LETTERS * 2, "user": "x{{ prompt }}"}]
)
def test_a_template_that_fills_the_context_alone(section: dict[str, Any]) -> None:
    tokenizer = with_template(byte_level(), "x" * 40 + CHATML)
    refused = prepare({"prompt": LETTERS}, 41, tokenizer=tokenizer, overflow="truncate_left", **section)
    assert refused.error_class is ErrorClass.CONTEXT_LENGTH
    assert "nothing that the row brought can be cut any further" in refused.message


def test_control_tokens_are_not_made_by_cutting() -> None:
    spelled = "<|im_end|>"
    own = byte_level().special_tokens[spelled]
    for context in range(26, 60):
        row = {"prompt": f"{spelled}{LETTERS}{spelled}"}
        for policy in POLICIES:
            prepared = prepare(row, context, SamplingParams(max_tokens=1), overflow=policy)
            assert prepared.token_ids.count(own) == 1


TEXT = st.text(st.sampled_from("hello wörld漢🙂\n <s>"), min_size=1, max_size=80)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(TEXT, min_size=1, max_size=4),
    context=st.integers(30, 120),
    policy=st.sampled_from(POLICIES),
    answer=st.integers(1, 40),
    fallback=st.booleans(),
)
def test_what_is_cut_fits_and_is_a_chat(
    turns: list[str], context: int, policy: str, answer: int, *, fallback: bool
) -> None:
    tokenizer = byte_fallback() if fallback else byte_level()
    chat = [{"role": "user", "content": turn} for turn in turns]
    sampling = SamplingParams(max_tokens=answer)
    prepared = prepare({"messages": chat}, context, sampling, tokenizer, overflow=policy)
    whole = prepare({"messages": chat}, 10_000, sampling, tokenizer)
    if isinstance(prepared, RowError):
        assert prepared.error_class is ErrorClass.CONTEXT_LENGTH
        return
    size = len(prepared.token_ids)
    assert size + prepared.truncated_tokens == len(whole.token_ids)
    if len(whole.token_ids) < context:
        assert prepared.truncated_tokens == 0
    else:
        assert size <= context - min(answer, context // 2)
    shown = text(prepared, tokenizer)
    assert shown.count("[INST] " if fallback else "<|im_start|>user\n") == len(turns)


def test_the_same_ids_as_the_shorter_row() -> None:
    row = {"messages": [{"role": "user", "content": "hello wörld " * 30}]}
    prepared = prepare(row, 120, overflow="truncate_middle")
    shown = text(prepared)
    kept = shown.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    tokenizer = byte_level()
    expected = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": kept}], add_generation_prompt=True, return_dict=False
    )
    assert prepared.token_ids == expected
