"""A row's own sampling: what it may say, and what it is told when it says something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen.sampling.overrides import RowSampling
from batchgen.sampling.resolve import resolve_sampling
from batchgen.types import ErrorClass, RowFailure, SamplingParams

SECTION = {
    "temperature": 0.5,
    "top_p": None,
    "max_tokens": 20,
    "min_tokens": 2,
    "stop": ["."],
    "per_row": "s",
}
DEFAULTS = {"top_p": 0.9}


def of_row(value: Any) -> SamplingParams:
    return RowSampling(SECTION, DEFAULTS, "s").of_row({"s": value})


def refused(value: Any) -> str:
    with pytest.raises(RowFailure) as failure:
        of_row(value)
    assert failure.value.error.error_class is ErrorClass.INVALID_PARAM
    return failure.value.error.message


@pytest.mark.parametrize("value", [None, {}, "", "{}", {"temperature": None}])
def test_a_row_that_says_nothing_is_the_jobs(value: Any) -> None:
    assert of_row(value) == SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=20, min_tokens=2, stop=(".",)
    )
    assert RowSampling(SECTION, DEFAULTS, "s").of_row({}) == of_row(None)


def test_overrides() -> None:
    given = {
        "temperature": 0,
        "max_tokens": 30.0,
        "stop": "x",
        "stop_token_ids": [3],
        "seed": 7,
        "ignore_eos": True,
        "presence_penalty": 1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "7": 1.5, "9": None},
        "bad_words": "never",
        "allowed_token_ids": [5, 7],
    }
    expected = SamplingParams(
        temperature=0.0,
        top_p=0.9,
        max_tokens=30,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=(3,),
        seed=7,
        ignore_eos=True,
        presence_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias={5: -100.0, 7: 1.5},
        bad_words=("never",),
        allowed_token_ids=(5, 7),
    )
    for value in (given, json.dumps(given)):
        assert of_row(value) == expected
    assert of_row({"top_p": 1, "stop": []}).top_p == 1.0


def test_rows_without_a_column() -> None:
    assert RowSampling({}, {}, None).of_row({"s": {"temperature": 9}}) == resolve_sampling({}, {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"temperature": float("inf")}, "column 's': temperature: inf is not allowed; use 0 or more"),
        ('{"temperature": Infinity}', "column 's': temperature: inf is not allowed; use 0 or more"),
        ('{"top_p": NaN}', "column 's': top_p: nan is not allowed; use a number above 0 and up to 1"),
        ({"temperature": "hot"}, "column 's': temperature: 'hot' is not allowed; use a number"),
        ({"temperature": True}, "column 's': temperature: True is not allowed; use a number"),
        ({"max_tokens": 1.5}, "column 's': max_tokens: 1.5 is not allowed; use a whole number"),
        ({"max_tokens": float("nan")}, "column 's': max_tokens: nan is not allowed; use a whole number"),
        ({"max_tokens": 0}, "column 's': max_tokens: 0 is not allowed; use 1 or more"),
        ({"max_tokens": 1}, "column 's': min_tokens: 2 is not allowed; use a number from 0 to max_tokens"),
        ({"ignore_eos": 1}, "column 's': ignore_eos: 1 is not allowed; use true or false"),
        ({"stop": [""]}, "column 's': stop: ('',) is not allowed; use non-empty strings"),
        ({"stop": [1]}, "column 's': stop: [1] is not allowed; use a list of non-empty strings"),
        (
            {"stop_token_ids": [True]},
            "column 's': stop_token_ids: [True] is not allowed; use a list of token ids",
        ),
        ({"frequency_penalty": 3}, "column 's': frequency_penalty: 3.0 is not allowed; use a number from -2"),
        ({"repetition_penalty": 0}, "column 's': repetition_penalty: 0.0 is not allowed; use a number above"),
        (
            {"logit_bias": {"a": 1}},
            "column 's': logit_bias: {'a': 1} is not allowed; use a map from token ids",
        ),
        (
            {"logit_bias": {"1": 101}},
            "column 's': logit_bias: {1: 101.0} is not allowed; use a map from token",
        ),
        ({"logit_bias": {"-1": 1}}, "column 's': logit_bias: {'-1': 1} is not allowed; use a map from token"),
        ({"bad_words": ["\ud800"]}, "column 's': bad_words: ('\\ud800',) is not allowed; use non-empty"),
        ({"logits_processors": []}, "column 's': 'logits_processors' is not a known key; "),
        ({"temprature": 1}, "column 's': 'temprature' is not a known key; did you mean temperature?"),
        ({"zzz": 1}, "column 's': 'zzz' is not a known key; known are temperature, top_p, "),
        ({"turns": 1}, "column 's': turns is the job's to set, not a row's; remove it"),
        ([1], "column 's' holds list, not an object of overrides such as {temperature: 0.5}"),
        (float("nan"), "column 's' holds NaN or an infinity, not an object"),
        (
            "{",
            "column 's' should hold an object of overrides as JSON, but: a key in double quotes is missing",
        ),
        ("[" * 100_000, "column 's' should hold an object of overrides as JSON, but: nested too deeply"),
    ],
)
def test_what_is_not_allowed(value: Any, message: str) -> None:
    assert refused(value).startswith(message)


def test_what_comes_later_says_so() -> None:
    known = set(SamplingParams.__dataclass_fields__)
    for key in {"n", "logprobs", "structured"} - known:
        assert refused({key: 1}) == f"column 's': {key} is not available in this version; remove it"


SEVERAL = {**SECTION, "n": 3, "temperature": 0.7}


@pytest.mark.parametrize(
    ("override", "n"), [({}, 3), ({"n": 1}, 1), ({"n": 5}, 5), ({"n": 1, "temperature": 0}, 1)]
)
def test_a_row_may_have_samples_of_its_own_number_where_rows_have_several(override: Any, n: int) -> None:
    assert RowSampling(SEVERAL, {}, "s").of_row({"s": override}).n == n


@pytest.mark.parametrize(
    ("section", "override", "message"),
    [
        (
            SECTION,
            {"n": 2, "temperature": 1},
            "n: 2 is not allowed, because rows have lists of answers only in",
        ),
        (SEVERAL, {"n": 0}, "n: 0 is not allowed; use 1 or more"),
        (SEVERAL, {"temperature": 0}, "n: 3 is not allowed; use 1 with temperature 0, where all samples"),
        (SEVERAL, {"n": True}, "n: True is not allowed; use a whole number"),
    ],
)
def test_numbers_of_samples_that_are_refused(section: Any, override: Any, message: str) -> None:
    with pytest.raises(RowFailure, match=f"column 's': {message}"):
        RowSampling(section, {}, "s").of_row({"s": override})
