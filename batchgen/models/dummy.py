"""`model.path: dummy:NAME`: a model of a known shape whose weights are noise, to measure speed with.

Called by `source.py`. On disk there is a folder with `config.json` and a tokenizer, in the cache. Weights are
never files: `dummy_weights.py` makes them where the engine runs. The tokenizer has a token for each byte and,
behind these, words such as ` abc`, each of which is one token in a text, too.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from batchgen.cache import cache_dir, key_of
from batchgen.models.dummy_shapes import SHAPES
from batchgen.types import UsageError

PREFIX = "dummy:"
SEED = "batchgen_dummy_seed"
"""In `config.json`: that weights are to be made, and from which seed."""
FORMAT = "1"
"""Of folders and of weights made from a seed."""
_SPECIAL = ("<|begin|>", "<|end|>", "<|turn|>")
_BYTES = 256
_MOST_TOKENS = 1 << 20
_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


class Dummy(NamedTuple):
    """A name taken apart: the configuration, seed included."""

    name: str
    config: dict[str, Any]


def parse(path: str, key: str = "model.path") -> Dummy:
    """Read `dummy:NAME` or `dummy:NAME?number=value&seed=1`.

    Args:
        path: begins with `PREFIX`.
        key: of the job file, for messages.

    Raises:
        UsageError: there is no such shape, or its configuration has no such number.
    """
    name, _, query = path.removeprefix(PREFIX).partition("?")
    if name not in SHAPES:
        raise UsageError(
            f"{key}: {path!r} names no shape that is known here; use dummy: and one of {', '.join(SHAPES)}"
        )
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = {**SHAPES[name], **special, "dtype": "bfloat16", SEED: 0}
    numbers = {
        n: v for n, v in SHAPES[name].items() if isinstance(v, int | float) and not isinstance(v, bool)
    }
    for given, text in parse_qsl(query, keep_blank_values=True):
        number = SEED if given == "seed" else given
        if number not in {*numbers, SEED}:
            raise UsageError(
                f"{key}: {path!r}: {given} is no number of this configuration; use seed, {', '.join(numbers)}"
            )
        config[number] = _number(path, key, given, text, type(config[number]))
    least = len(_SPECIAL) + _BYTES
    if not least <= config["vocab_size"] <= _MOST_TOKENS:
        raise UsageError(
            f"{key}: {path!r}: vocab_size is {config['vocab_size']}; use {least}, which has every byte, to "
            f"{_MOST_TOKENS}"
        )
    return Dummy(name, config)


def folder(path: str, key: str = "model.path") -> Path:
    """A folder with the configuration and a tokenizer, made the first time; raises as `parse` does."""
    name, config = parse(path, key)
    text = json.dumps(config, indent=1)
    target = cache_dir() / "dummy" / f"{name}-{key_of([FORMAT, text])[:16]}"
    if target.is_dir():
        return target
    target.parent.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        (temporary / "config.json").write_text(text)
        _write_tokenizer(temporary, config["vocab_size"], config["max_position_embeddings"])
        temporary.rename(target)
    except OSError:
        # Another process was faster, or the disk does not take it.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _number(path: str, key: str, given: str, text: str, kind: type) -> int | float:
    try:
        value: int | float = kind(text)
    except ValueError:
        value = -1
    if value < 0 or (value == 0 and given != "seed") or value == float("inf"):
        raise UsageError(
            f"{key}: {path!r}: {given} is {text!r}; use a {'whole ' if kind is int else ''}number"
            f"{' of 0 or more' if given == 'seed' else ' above 0'}"
        )
    return value


def _write_tokenizer(place: Path, vocab_size: int, longest: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"Ġ{_letters(i)}" for i in range(vocab_size - len(pieces))]
    # A word of the vocabulary is one token, without merges that lead to it.
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(place / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": longest,
        "chat_template": _TEMPLATE,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    letters, number = "", number + 1
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return letters
