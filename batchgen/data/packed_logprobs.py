"""Logprobs of one answer's tokens, packed for the way from a worker to the journal and into a part.

A list that msgpack takes: token ids, logprobs and ranks, then how many of the likeliest tokens go with each,
their ids and their logprobs, end to end; last, of every id that occurs, its text. Numbers are arrays of 32
bits in the machine's own order, which is little-endian wherever batchgen runs. Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from batchgen.scores import TokenScores


@dataclass(slots=True)
class PackedLogprobs:
    """The same, unpacked: what a column or a line is made of.

    Args:
        ids, logprobs, ranks: `(T,)`, of the answer's tokens.
        top_k: how many of the likeliest tokens go with each.
        top_ids, top_logprobs: `(T * top_k,)`, likeliest first.
        texts: bytes of every token that occurs, by id.
    """

    ids: array[int]
    logprobs: array[float]
    ranks: array[int]
    top_k: int
    top_ids: array[int]
    top_logprobs: array[float]
    texts: Mapping[int, bytes]

    @classmethod
    def of(cls, scores: TokenScores, text_of: Callable[[int], bytes]) -> Self:
        """From what the engine says of the tokens of an answer.

        Args:
            scores: of T tokens.
            text_of: from a token id to its bytes.
        """
        flat = [token for likeliest in scores.top for token in likeliest]
        ids = array("i", scores.token_ids)
        top_ids = array("i", [token.token_id for token in flat])
        return cls(
            ids,
            array("f", scores.logprobs),
            array("i", scores.ranks),
            len(flat) // len(ids) if ids else 0,
            top_ids,
            array("f", [token.logprob for token in flat]),
            {token: text_of(token) for token in sorted({*ids, *top_ids})},
        )

    def pack(self) -> list[Any]:
        """What `unpack` takes."""
        return [
            self.ids.tobytes(),
            self.logprobs.tobytes(),
            self.ranks.tobytes(),
            self.top_k,
            self.top_ids.tobytes(),
            self.top_logprobs.tobytes(),
            [[token, text] for token, text in self.texts.items()],
        ]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Self:
        ids, logprobs, ranks, top_k, top_ids, top_logprobs, texts = packed
        return cls(
            _array("i", ids),
            _array("f", logprobs),
            _array("i", ranks),
            top_k,
            _array("i", top_ids),
            _array("f", top_logprobs),
            dict(texts),
        )

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> Self:
        """From the records of a part, which have the texts of tokens and not their bytes."""
        flat = [token for record in records for token in record["top"]]
        return cls(
            array("i", [record["id"] for record in records]),
            array("f", [record["logprob"] for record in records]),
            array("i", [record["rank"] for record in records]),
            len(flat) // len(records) if records else 0,
            array("i", [token["id"] for token in flat]),
            array("f", [token["logprob"] for token in flat]),
            {token["id"]: token["token"].encode(errors="surrogatepass") for token in (*records, *flat)},
        )

    def texts_of(self, ids: Iterable[int]) -> Iterator[str]:
        """Text of each token; bytes that are no UTF-8 by themselves read as U+FFFD."""
        texts = {token: text.decode(errors="replace") for token, text in self.texts.items()}
        return (texts[token] for token in ids)

    def records(self) -> Iterator[dict[str, Any]]:
        """A record for each token, as JSON lines have it; logprobs in as few digits as tell them."""
        likeliest = zip(
            self.texts_of(self.top_ids), self.top_ids, map(shortest, self.top_logprobs), strict=True
        )
        top = [{"token": text, "id": token, "logprob": logprob} for text, token, logprob in likeliest]
        k = self.top_k
        for i, text in enumerate(self.texts_of(self.ids)):
            yield {
                "token": text,
                "id": self.ids[i],
                "logprob": shortest(self.logprobs[i]),
                "rank": self.ranks[i],
                "top": top[k * i : k * (i + 1)],
            }


def shortest(value: float) -> float:
    """Of all decimal numbers that round to a float32, one of the fewest digits."""
    for digits in (6, 7, 8):
        candidate = float(f"{value:.{digits}g}")
        if array("f", [candidate])[0] == value:
            return candidate
    return float(f"{value:.9g}")


def _array(kind: str, data: bytes) -> array[Any]:
    values: array[Any] = array(kind)
    values.frombytes(data)
    return values
