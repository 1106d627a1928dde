"""Text that comes a token at a time is the text of all tokens."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import ALL, byte_fallback, byte_level

from batchgen.text.detokenizer import IncrementalDetokenizer
from batchgen.text.tokenizer import Tokenizer


def check_every_prefix(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer, settled = IncrementalDetokenizer(tokenizer), ""
    for count, token_id in enumerate(ids, start=1):
        settled += detokenizer.append(token_id)
        assert settled + detokenizer.pending == tokenizer.decode(ids[:count])


@pytest.mark.parametrize("make", ALL)
@given(data=st.data())
def test_settled_and_pending_are_the_full_decode(make, data):
    tokenizer = make()
    # Ids beyond the vocabulary happen where a model's embedding is padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    check_every_prefix(tokenizer, ids)


@given(text=st.text(max_size=30))
@example("a \n\n你好🙂� \u200d")
def test_real_text(text):
    for make in ALL:
        tokenizer = make()
        check_every_prefix(tokenizer, tokenizer.encode_batch([text])[0])


@given(runs=st.lists(st.sampled_from(["你", "\n", " ", "\xff", "h", "🙂"]), max_size=12))
def test_runs_of_byte_tokens(runs):
    tokenizer = byte_fallback()
    ids = []
    for piece in runs:
        raw = b"\xff" if piece == "\xff" else piece.encode()
        ids += [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in raw]
        if piece == "h":
            ids[-1] = tokenizer.backend.token_to_id("h")
    check_every_prefix(tokenizer, ids)


@given(tail=st.lists(st.integers(0, 255), max_size=8), stray=st.integers(0x80, 0xFF))
def test_a_long_stretch_that_is_no_utf8_is_settled_in_parts(tail, stray):
    tokenizer = byte_level()
    id_of = {byte: tokenizer.backend.token_to_id(char) for byte, char in byte_alphabet().items()}
    ids = [id_of[stray]] * 80 + [id_of[byte] for byte in tail]
    check_every_prefix(tokenizer, ids)


def test_long_stretches_keep_the_window_short():
    tokenizer = byte_level()
    replacement = tokenizer.encode_batch(["�"])[0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(400):
        for token_id in replacement:
            detokenizer.append(token_id)
        assert len(detokenizer.pending) < 50


def byte_alphabet() -> dict[int, str]:
    """Byte to character of byte-level BPE: printable bytes are themselves, the rest follow from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


@given(ids=st.lists(st.integers(0, 260), max_size=20))
def test_decode_is_that_of_transformers(ids):
    for make in ALL[:2]:
        tokenizer = make()
        assert tokenizer.decode(ids) == tokenizer.hf.decode(ids, skip_special_tokens=True)


def test_an_incomplete_last_character_reads_u_fffd():
    tokenizer = byte_level()
    ids = tokenizer.encode_batch(["hello 🙂"])[0]
    assert tokenizer.decode(ids[:-1]) == "hello \ufffd"
