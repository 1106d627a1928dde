"""The tokenizer of a model: text to ids, ids to text, and the source of its chat template.

Wraps a fast tokenizer of transformers, loaded from a local folder and never from the network. Used
by the prompt renderer, the detokenizer and the stop checker in the engine worker, and by `validate`
and `show`, which load no weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchgen.text.stored_tokenizer import StoredFacts, facts_of, keep_tokenizer, load_stored, stored_key
from batchgen.types import UsageError

# Encodings of a group are freed before the next one is made, so that memory does not grow with the batch.
GROUP = 128

_META_SPACE = "\u2581"
# How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)},
}

_FILES = (
    "tokenizer*",
    "*token*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)


def fingerprint(folder: Path) -> str:
    """Hash the tokenizer's files, chat template included; needs no transformers.

    Args:
        folder: a model folder; weights and other files in it do not count.

    Returns:
        sha256 in hex over names, sizes and contents.
    """
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()}):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


class Tokenizer:
    """A fast tokenizer and what the model's files say about its special tokens.

    Args:
        hf: a transformers tokenizer that wraps one of the `tokenizers` library; None for one from the cache.
        folder: where it was loaded from; None for one made in memory.
        stored: of the cache: a tokenizer of the `tokenizers` library, and what is known beside it.
    """

    def __init__(
        self, hf: Any, folder: Path | None = None, stored: tuple[Any, StoredFacts] | None = None
    ) -> None:
        self._hf = hf
        self.folder = folder
        self.backend: Any = hf.backend_tokenizer if stored is None else stored[0]
        self._facts: StoredFacts | None = None if stored is None else stored[1]
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """Load from a local folder, which `batchgen.models.source` has found.

        Raises:
            UsageError: no tokenizer in it, one that needs code of its own, or one without a fast
                implementation.
        """
        folder = Path(path)
        key = stored_key(folder)
        stored = None if key is None else load_stored(key)
        if stored is not None:
            return cls(None, folder, stored)
        tokenizer = cls(_load_by_transformers(path), folder)
        if key is not None:
            keep_tokenizer(key, tokenizer.backend, facts_of(tokenizer.hf))
        return tokenizer

    @property
    def hf(self) -> Any:
        """transformers' own tokenizer; of one from the cache it is loaded when it is first asked for."""
        if self._hf is None:
            self._hf = _load_by_transformers(str(self.folder))
        return self._hf

    def fingerprint(self) -> str:
        """Hash of the tokenizer's files; of the serialised tokenizer if it was made in memory."""
        if self.folder is not None:
            return fingerprint(self.folder)
        return hashlib.sha256(f"{self.backend.to_str()}\0{self.chat_template}".encode()).hexdigest()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Every special token as it is written, and its id; these are left out of decoded text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added.items()) if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of `special_tokens`."""
        return frozenset(self.special_tokens.values())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's embedding may be larger."""
        ids: Iterable[int] = self.backend.get_vocab(with_added_tokens=True).values()
        return max(ids) + 1

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Byte of each token like `<0xE4>` that decoding joins to characters; mostly none."""
        if not any(part.get("type") == "ByteFallback" for part in self._decoders):
            return {}
        ids = {byte: self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        return {token_id: byte for byte, token_id in ids.items() if token_id is not None}

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for in a text, by itself: a space before a word is kept, half a character too.

        An id that the vocabulary does not have stands for nothing.
        """
        spelling = self.token(token_id)
        if spelling is None:
            return b""
        if token_id in self._written_out:
            return spelling.encode(errors="surrogatepass")
        if token_id in self.byte_tokens:
            return bytes([self.byte_tokens[token_id]])
        if self._is_byte_level:
            return bytes(_BYTE_OF[c] for c in spelling if c in _BYTE_OF)
        return spelling.replace(_META_SPACE, " ").encode(errors="surrogatepass")

    @cached_property
    def _written_out(self) -> frozenset[int]:
        """Ids of added tokens, which the vocabulary spells as they are in a text."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(part.get("type") == "ByteLevel" for part in self._decoders)

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        return [decoder, *decoder.get("decoders", ())]

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id; a model's generation configuration may name more."""
        token_id: int | None = self._known.eos_token_id
        return token_id

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence id, whether or not it is put before plain text."""
        token_id: int | None = self._known.bos_token_id
        return token_id

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before plain text: mostly BOS or nothing."""
        text = self._known_text
        plain = self.backend.encode(text, add_special_tokens=False).ids
        full = self.backend.encode(text, add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()

    @property
    def _known_text(self) -> str:
        """Some text that can be encoded: a tokenizer of words without an unknown token takes only its own."""
        return "a" if self.backend.token_to_id("a") is not None else next(iter(self.backend.get_vocab()), "a")

    @cached_property
    def suffix_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself puts behind plain text: mostly nothing, of some embedding models EOS."""
        plain = self.backend.encode("a", add_special_tokens=False).ids
        full = self.backend.encode("a", add_special_tokens=True).ids
        start = len(self.prefix_ids)
        return tuple(full[start + len(plain) :]) if full[start : start + len(plain)] == plain else ()

    @property
    def chat_template(self) -> str | None:
        """The (default) chat template, or None for a tokenizer without one."""
        template = self._known.chat_template
        return template.get("default") if isinstance(template, Mapping) else template

    @property
    def _known(self) -> Any:
        """What has the attributes of `StoredFacts`."""
        return self._hf if self._facts is None else self._facts

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. Special tokens written in it become their ids; none is added."""
        return encode_groups(self.backend, texts)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids without special tokens; ids outside the vocabulary have no text.

        Equals transformers' `decode(ids, skip_special_tokens=True)` without its clean-up of spaces,
        which transformers skips as well for BPE because it damages text. Bytes that are no UTF-8,
        such as a last character of which not all tokens came, read as U+FFFD.
        """
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Iterable[int]) -> str:
        """Text of the ids with special tokens as they are written."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, such as `Ġhello`; None for an unknown one."""
        spelling: str | None = self.backend.id_to_token(token_id)
        return spelling

    def chat_source(self, template: str | None = None, *, with_tools: bool = False) -> str | None:
        """The text of the chat template in effect; None for a tokenizer without one.

        Args:
            template: the job's own, or the name of one of several that the tokenizer has.
            with_tools: whether tools are given: some tokenizers have a template of their own for that.

        Raises:
            UsageError: no template of the tokenizer has this name.
        """
        given = self._known.chat_template
        if template is None and not given:
            return None
        named = given if isinstance(given, Mapping) else {}
        if template is not None and template not in named:
            if "{" in template or "\n" in template:
                return template
            known = f"it has {', '.join(sorted(named))}" if named else "it has none with a name"
            raise UsageError(
                f"prompt.chat_template: {template!r} is neither a file nor the name of a template of this "
                f"tokenizer ({known}); give another name, a file, or the template itself"
            )
        if template is None and not named:
            return str(given)
        name = template or ("tool_use" if with_tools and "tool_use" in named else "default")
        if name not in named:
            raise ValueError(f"the tokenizer has templates named {', '.join(sorted(named))} and no default")
        return str(named[name])

    @property
    def template_variables(self) -> dict[str, Any]:
        """What every chat template may read: the special tokens by their names, such as `bos_token`."""
        return dict(self._known.special_tokens_map)


def encode_groups(backend: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encode in bounded groups with a tokenizer of the `tokenizers` library, adding no special token."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), GROUP):
        group = list(texts[start : start + GROUP])
        ids.extend(e.ids for e in backend.encode_batch_fast(group, add_special_tokens=False))
    return ids


def _load_by_transformers(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        # Left open, transformers would ask on the terminal whether to run code from the folder.
        hf = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"model.tokenizer: {path} needs code of its own, which is never run; "
                "give one that comes as tokenizer.json"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"model.tokenizer: {path} holds no tokenizer that loads ({type(error).__name__}: {reason}); "
            "the folder needs tokenizer.json, or the files that transformers makes one from"
        ) from error
    if not getattr(hf, "is_fast", False):
        raise UsageError(
            f"model.tokenizer: {path} has only a slow Python tokenizer ({type(hf).__name__}); "
            "convert it once to tokenizer.json and set model.tokenizer to that folder"
        )
    return hf
