"""Logprobs as OpenAI's answers have them, and back. For lines of the format openai_batch.

Beyond the documented members a token has its `id` and `rank`, so that nothing is lost on the way.
Sources: https://platform.openai.com/docs/api-reference/chat/object and …/completions/object.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Mapping
from typing import Any

from batchgen.data.packed_logprobs import PackedLogprobs, shortest


def chat_logprobs(found: PackedLogprobs) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    top = [
        _token(found, token, logprob)
        for token, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
    ]
    k = found.top_k
    content = [
        {
            **_token(found, token, logprob),
            "rank": found.ranks[i],
            "top_logprobs": top[k * i : k * (i + 1)],
        }
        for i, (token, logprob) in enumerate(zip(found.ids, found.logprobs, strict=True))
    ]
    return {"content": content, "refusal": None}


def _token(found: PackedLogprobs, token: int, logprob: float) -> dict[str, Any]:
    data = found.texts[token]
    text = data.decode(errors="replace")
    return {"token": text, "logprob": shortest(logprob), "bytes": list(data), "id": token}


def completion_logprobs(found: PackedLogprobs) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion, and `content` as of a chat: only that has ids and ranks.

    Of likeliest tokens with the same text the first is named.
    """
    texts = list(found.texts_of(found.ids))
    top_texts = list(found.texts_of(found.top_ids))
    k = found.top_k
    top = []
    for i in range(len(found.ids)):
        named: dict[str, float] = {}
        for text, logprob in zip(top_texts[k * i : k * (i + 1)], found.top_logprobs[k * i :], strict=False):
            named.setdefault(text, shortest(logprob))
        top.append(named)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token in found.ids:
        offsets.append(length)
        length += len(decoder.decode(found.texts[token]))
    return {
        "tokens": texts,
        "token_logprobs": [shortest(logprob) for logprob in found.logprobs],
        "top_logprobs": top if k else None,
        "text_offset": offsets,
        "content": chat_logprobs(found)["content"],
    }


def read_logprobs(member: Mapping[str, Any]) -> PackedLogprobs:
    """What one of these two wrote."""
    content = member["content"]
    flat = [token for one in content for token in one["top_logprobs"]]
    return PackedLogprobs(
        array("i", [one["id"] for one in content]),
        array("f", [one["logprob"] for one in content]),
        array("i", [one["rank"] for one in content]),
        len(flat) // len(content) if content else 0,
        array("i", [token["id"] for token in flat]),
        array("f", [token["logprob"] for token in flat]),
        {token["id"]: bytes(token["bytes"]) for token in (*content, *flat)},
    )
