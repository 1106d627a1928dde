"""The lines of an OpenAI batch file as rows. For `open_text`.

    {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], …}}

become columns that every job knows: `custom_id` (the id), `messages` or `prompt`, `model` (as asked for; the
job's own model answers), `url`, and `sampling`, a dict of the overrides for this row. A member of the body
that would change the answer and has no such column is an error of its row; nothing is dropped silently.
Source: the Batch API reference of OpenAI, https://platform.openai.com/docs/api-reference/batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.data.exact_json import Decoded
from batchgen.types import ErrorClass, RowFailure

ID_COLUMN = "custom_id"
SAMPLING_COLUMN = "sampling"

# Body key to our name of it.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "ignore_eos": "ignore_eos",
}
# They say nothing about the answer: who asks, how it is billed, kept or delivered.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
# What each of these means when it asks for nothing.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "best_of": (1,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "suffix": ("",),
    "modalities": (["text"],),
    "background": (False,),
    "truncation": ("disabled",),
}
_LOGPROBS = ("logprobs", "top_logprobs")
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}:]', re.DOTALL)


def looks_like_batch(head: bytes) -> bool:
    """Whether the first record of JSONL text has the four members of a batch line, `body` an object.

    Args:
        head: the beginning of the text; members that begin behind it are not seen.
    """
    found = dict(_members(head))
    return found.keys() >= {b"custom_id", b"method", b"url", b"body"} and found[b"body"] == b"{"


def _members(head: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The members of the first object: name and first byte of the value."""
    depth, last = 0, b""
    for token in _TOKEN.finditer(head):
        text = token.group()
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
            if depth <= 0:
                return
        elif text == b":" and depth == 1:
            yield last, head[token.end() :].lstrip()[:1]
        elif depth == 1:
            last = text[1:-1]


def unwrap(decoded: Decoded) -> Decoded:
    """One line as columns. Raises RowFailure: missing_column or invalid_param."""
    line = decoded.values
    for name, kind in ((ID_COLUMN, str), ("url", str), ("body", dict)):
        if not isinstance(line.get(name), kind):
            what = "an object" if kind is dict else "a string"
            raise RowFailure(
                ErrorClass.MISSING_COLUMN, f"a line of an OpenAI batch needs {name!r}, which is {what}"
            )
    source = prompt_member(line["url"])
    if str(line.get("method", "POST")).upper() != "POST":
        raise _refused(f"method {line['method']!r} is not supported; use POST")
    body: dict[str, Any] = dict(line["body"])
    values = {ID_COLUMN: line[ID_COLUMN], "url": line["url"], "model": body.pop("model", None)}
    values |= _prompt(body, source)
    values[SAMPLING_COLUMN] = _sampling(body)
    _refuse_nonfinite(line["body"], decoded)
    return Decoded(values, decoded.notes, tuple(name for name in decoded.nonfinite if name in values))


def prompt_member(url: str) -> str:
    """The member of the body that holds the prompt of this endpoint. Raises RowFailure: invalid_param."""
    path = "/" + url.partition("?")[0].rstrip("/").rpartition("/v1/")[2]
    found = _PROMPTS.get(f"/v1{path}")
    if found is None:
        what = "asks for embeddings, which" if path == "/embeddings" else "is an endpoint that"
        raise _refused(
            f"url {url!r} {what} batchgen does not serve from a batch file; it serves {', '.join(_PROMPTS)}"
        )
    return found


def _prompt(body: dict[str, Any], source: str) -> dict[str, Any]:
    if body.get(source) is None:
        raise RowFailure(ErrorClass.NULL_PROMPT, f"body.{source} is missing or null")
    value = body.pop(source)
    if source == "messages":
        return {"messages": value}
    if source == "prompt":
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            value = value[0]
        if not isinstance(value, str):
            raise _refused("body.prompt is not one string; give each prompt a line of its own")
        return {"prompt": value}
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    instructions = body.pop("instructions", None)
    if instructions is not None and isinstance(messages, list):
        messages = [{"role": "system", "content": instructions}, *messages]
    return {"messages": messages}


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    found = _logprobs(body)
    for key, value in body.items():
        if value is None or key in _WITHOUT_EFFECT or key in _LOGPROBS:
            continue
        ours = _SAMPLING.get(key)
        if ours is None:
            if not _is_off(key, value):
                raise _refused(f"body.{key} is not supported and would change the answer; remove it")
        elif ours in found and found[ours] != value:
            raise _refused(f"body.{key} contradicts another member that sets {ours}; keep one")
        else:
            found[ours] = [value] if key == "stop" and isinstance(value, str) else value
    return found


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat says whether and then how many, a completion only how many."""
    wanted, likeliest = (body.get(key) for key in _LOGPROBS)
    if wanted is None or wanted is False:
        if likeliest:
            raise _refused("body.top_logprobs needs body.logprobs: true; add it")
        return {}
    if wanted is True:
        return {"logprobs": likeliest or 0}
    if likeliest is not None:
        raise _refused("body.top_logprobs has no meaning beside a number in body.logprobs; keep one")
    return {"logprobs": wanted}


def _is_off(key: str, value: Any) -> bool:
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in _OFF.get(key, ()))


def _refuse_nonfinite(body: Any, decoded: Decoded) -> None:
    """NaN in a field that decides the answer; `decode` has put null in its place."""
    if "body" in decoded.nonfinite:
        raise _refused("body holds NaN or Infinity, which is no value of any of its members; repair it")


def _refused(message: str) -> RowFailure:
    return RowFailure(ErrorClass.INVALID_PARAM, message)
