"""Stop conditions against a definition by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level

from batchgen.text.stop import Finish, StopChecker, StopRules
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import FinishReason, SamplingParams


def checker(tokenizer: Tokenizer, max_tokens=None, eos=(), **sampling) -> StopChecker:
    sampling.setdefault("max_tokens", 1000)
    return StopChecker(StopRules(SamplingParams(**sampling), eos, tokenizer), max_tokens)


def run(text: str, tokenizer: Tokenizer | None = None, **kwargs) -> Finish | None:
    tokenizer = tokenizer or byte_level()
    return checker(tokenizer, **kwargs).prime(tokenizer.encode_batch([text])[0])


def brute_force(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int) -> tuple | None:
    """(tokens seen, string, text) by decoding everything at every token."""
    barred = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if count < min_tokens:
            barred = max(barred, len(text.rstrip("\ufffd")))
            continue
        found = []
        for stop in stops:
            ends = (at + len(stop) for at in range(len(text)) if text.startswith(stop, at))
            found += [(end, end - len(stop), stop) for end in ends if end > barred]
        if found:
            _, start, stop = min(found)
            return count, stop, text[:start]
    return None


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(data=st.data())
def test_same_as_brute_force(make, data):
    tokenizer = make()
    text = data.draw(st.text(alphabet="ab\n你h ", max_size=25))
    stops = data.draw(st.lists(st.text(alphabet="ab\n你h ", min_size=1, max_size=4), min_size=1, max_size=3))
    min_tokens = data.draw(st.integers(0, 6))
    ids = tokenizer.encode_batch([text])[0]
    broken = data.draw(st.lists(st.integers(0, len(ids)), max_size=3))
    ids = [token_id for position, token_id in enumerate(ids) if position not in broken]
    subject = checker(tokenizer, stop=tuple(stops), min_tokens=min_tokens)
    expected = brute_force(tokenizer, ids, stops, min_tokens)
    for count, token_id in enumerate(ids, start=1):
        finish = subject.append(token_id)
        if finish is not None:
            assert expected == (count, finish.stop_reason, finish.text)
            assert finish.reason is FinishReason.STOP
            assert tokenizer.decode(finish.token_ids).startswith(finish.text)
            assert finish.token_ids == ids[: len(finish.token_ids)]
            kept = finish.token_ids[:-1]
            assert not finish.token_ids or not tokenizer.decode(kept).startswith(finish.text)
            return
    assert expected is None


def test_a_string_across_token_borders_cuts_text_and_ids_together():
    finish = run("he hello world", stop=("o w",))
    assert (finish.text, finish.stop_reason) == ("he hell", "o w")
    tokenizer = byte_level()
    # The token `hello` straddles the cut and stays.
    assert tokenizer.decode(finish.token_ids) == "he hello"


def test_the_string_that_completes_first_wins_then_the_longest():
    assert run("abcd", stop=("abcd", "c")).stop_reason == "c"
    assert run("abcd", stop=("c", "abc", "bc")).stop_reason == "abc"


def test_a_line_break_as_a_byte_token_stops_at_once():
    tokenizer = byte_fallback()
    ids = tokenizer.encode_batch(["hello\n\nworld"])[0]
    subject = checker(tokenizer, stop=("\n",))
    ends = [count for count, token_id in enumerate(ids, start=1) if subject.append(token_id)]
    assert tokenizer.decode(ids[: ends[0]]) == "hello\n"


def test_end_of_sequence_is_not_part_of_the_text():
    finish = run("hello<|im_end|> x", eos=[byte_level().eos_token_id])
    assert (finish.reason, finish.stop_reason, finish.text) == (FinishReason.STOP, None, "hello")
    assert byte_level().eos_token_id not in finish.token_ids


def test_ignored_end_of_sequence():
    finish = run("hello<|im_end|>h", eos=[byte_level().eos_token_id], ignore_eos=True, max_tokens=3)
    assert (finish.reason, finish.text) == (FinishReason.LENGTH, "helloh")
    assert len(finish.token_ids) == 3


def test_stop_token_ids_and_their_order_after_end_of_sequence():
    hello = byte_level().encode_batch(["hello"])[0][0]
    assert run("h hello", stop_token_ids=(hello,)).stop_reason == hello
    assert run("h hello", stop_token_ids=(hello,), eos=[hello]).stop_reason is None
    assert run("h hello", stop_token_ids=(hello,), stop=("hello",)).stop_reason == hello
    assert run("h hello", stop=("hello",), max_tokens=3).reason is FinishReason.STOP


def test_a_special_token_written_out_as_a_stop_string():
    finish = run("hello<|endoftext|>h", stop=("<|endoftext|>",))
    assert (finish.text, finish.stop_reason) == ("hello", "<|endoftext|>")


def test_length_and_a_shorter_room():
    assert run("abcdef", max_tokens=3).token_ids == byte_level().encode_batch(["abc"])[0]
    tokenizer = byte_level()
    finish = checker(tokenizer, max_tokens=1).append(tokenizer.encode_batch(["a"])[0][0])
    assert (finish.reason, finish.text) == (FinishReason.LENGTH, "a")


def test_nothing_but_length_stops_before_min_tokens():
    eos = byte_level().eos_token_id
    assert run("<|im_end|>a", eos=[eos], min_tokens=3) is None
    assert run("aXbX", stop=("X",), min_tokens=3).text == "aXb"
    assert run("aXb", stop=("X",), min_tokens=3) is None
    assert run("abc", stop=("X",), min_tokens=3, max_tokens=3).reason is FinishReason.LENGTH


@given(data=st.data())
def test_a_primed_checker_goes_on_as_one_that_saw_every_token(data):
    tokenizer = byte_level()
    ids = tokenizer.encode_batch([data.draw(st.text(alphabet="abc你", max_size=20))])[0]
    split = data.draw(st.integers(0, len(ids)))
    sampling = {"stop": ("ab", "c你"), "min_tokens": data.draw(st.integers(0, 4)), "max_tokens": 15}
    whole = checker(tokenizer, **sampling).prime(ids)
    resumed = checker(tokenizer, **sampling)
    assert (resumed.prime(ids[:split]) or resumed.prime(ids[split:])) == whole
