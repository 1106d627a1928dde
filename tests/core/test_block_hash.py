"""The hash chain: stable, incremental, and different wherever keys and values may differ."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.block_hash import (
    HASH_SIZE,
    ROOT_HASH,
    block_key,
    encode_extra_keys,
    extend_block_hashes,
    hash_block,
)
from batchgen.types import Request, SamplingParams

GOLDEN = "df25cf729c93c5618a50ab3a3b572530"


def hashes(tokens, block_size=4, cache_keys=()):
    request = Request(0, list(tokens), SamplingParams(), cache_keys=cache_keys)
    extend_block_hashes(request, block_size)
    return request.block_hashes


def test_only_full_blocks_have_names():
    assert hashes([1, 2, 3]) == []
    assert len(hashes(range(11))) == 2
    assert all(len(h) == HASH_SIZE for h in hashes(range(11)))


def test_names_are_the_same_in_every_process():
    """A golden value: a cache that is ever kept must be found again."""
    assert hashes(range(8))[-1].hex() == GOLDEN
    code = (
        "from batchgen.core.block_hash import *; from batchgen.types import *\n"
        "r = Request(0, list(range(8)), SamplingParams()); extend_block_hashes(r, 4)\n"
        "print(r.block_hashes[-1].hex())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert found.stdout.strip() == GOLDEN


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_extending_in_pieces_gives_the_same_chain(tokens, cuts):
    prompt, output = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    request = Request(0, prompt, SamplingParams())
    for cut in sorted(cuts):
        request.output_token_ids = output[:cut]
        extend_block_hashes(request, 4)
    request.output_token_ids = output
    extend_block_hashes(request, 4)
    assert request.block_hashes == hashes(tokens)


def test_a_name_stands_for_the_whole_prefix():
    a, b = hashes([0, 0, 0, 0, 1, 1, 1, 1]), hashes([9, 0, 0, 0, 1, 1, 1, 1])
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert hash_block(ROOT_HASH, b"\0" * 16) == a[0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([("salt", "x")], [("lora", "x")]),
        ([("a", "bc")], [("ab", "c")]),
        ([("a",), ("b",)], [("a", "b")]),
        ([("n", 1)], [("n", "1")]),
        ([("n", "1")], [("n", b"1")]),
        ([("lora", "name", "/old")], [("lora", "name", "/new")]),
        ([], [("",)]),
    ],
)
def test_extra_keys_never_meet(left, right):
    assert encode_extra_keys(left) != encode_extra_keys(right)


def test_extra_keys_enter_at_their_position_and_stay():
    plain = hashes(range(12))
    salted = hashes(range(12), cache_keys=((0, ("salt", "x")),))
    image = hashes(range(12), cache_keys=((5, ("image", b"digest")),))
    assert not set(plain) & set(salted)
    assert image[0] == plain[0]
    assert not set(plain[1:]) & set(image[1:])
    assert image[1] != hashes(range(12), cache_keys=((6, ("image", b"digest")),))[1]


def test_groups_have_their_own_keys():
    [name] = hashes(range(4))
    assert block_key(name, 0) != block_key(name, 1)


def test_lone_surrogates_and_large_ids_are_accepted():
    assert hashes([2**31 - 1] * 4, cache_keys=((0, ("salt", "\ud800")),))
