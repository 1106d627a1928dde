"""The hash chain that names the contents of full cache blocks. Used by the manager and the prefix index.

Block i is named by H(name of block i-1, its token ids, its extra keys), so a name stands for the whole
prefix up to the end of its block. 128 bits of blake2b with a fixed key: the same names in every process.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable

from batchgen.types import CacheKey, Request

BlockHash = bytes
"""16 bytes; names a block of tokens together with everything before it."""

BlockKey = bytes
"""A `BlockHash` followed by 4 bytes of group id: one map serves the blocks of all groups."""

HASH_SIZE = 16
_TOKEN_BYTES = array("i").itemsize
_DOMAIN = b"batchgen.kv.1"
ROOT_HASH: BlockHash = hashlib.blake2b(b"root", digest_size=HASH_SIZE, person=_DOMAIN).digest()


def block_key(block_hash: BlockHash, group_id: int) -> BlockKey:
    """The name under which a group's block is kept in the prefix index."""
    return block_hash + group_id.to_bytes(4, "little")


def hash_block(parent: BlockHash, token_bytes: bytes | memoryview, extra_keys: bytes = b"") -> BlockHash:
    """Name of one full block.

    Args:
        parent: name of the block before it, or `ROOT_HASH`.
        token_bytes: the block's token ids as consecutive int32; their number is the block size.
        extra_keys: from `encode_extra_keys`.
    """
    digest = hashlib.blake2b(parent, digest_size=HASH_SIZE, person=_DOMAIN)
    digest.update(token_bytes)
    if extra_keys:
        digest.update(extra_keys)
    return digest.digest()


def encode_extra_keys(keys: Iterable[tuple[str | int | bytes, ...]]) -> bytes:
    """Bytes that differ whenever the tagged tuples differ.

    Every value carries its type and length, so neither ("salt", "x") and ("lora", "x") nor
    ("a", "bc") and ("ab", "c") nor 1 and "1" can meet.
    """
    parts: list[bytes] = []
    for key in keys:
        parts.append(b"(%d" % len(key))
        for value in key:
            tag, raw = _encode_value(value)
            parts.append(b"%s%d:%s" % (tag, len(raw), raw))
    return b"".join(parts)


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Append to `request.block_hashes` the names of all blocks that its known tokens have filled.

    Known tokens are final, so names are only ever added and nothing is hashed twice. Extra keys enter
    the block that holds their position; the chain carries them into every later block.
    """
    hashes = request.block_hashes
    first, stop = len(hashes), request.num_tokens // block_size
    if first >= stop:
        return
    token_bytes = memoryview(_int32_bytes(request.tokens(first * block_size, stop * block_size)))
    step = block_size * _TOKEN_BYTES
    parent = hashes[-1] if hashes else ROOT_HASH
    for i in range(stop - first):
        extra = _extra_keys(request.cache_keys, (first + i) * block_size, block_size)
        parent = hash_block(parent, token_bytes[i * step : (i + 1) * step], extra)
        hashes.append(parent)


def _extra_keys(keys: tuple[CacheKey, ...], start: int, block_size: int) -> bytes:
    if not keys:
        return b""
    return encode_extra_keys(
        (position - start, *values) for position, values in keys if start <= position < start + block_size
    )


def _encode_value(value: str | int | bytes) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return b"i", b"%d" % value
    return b"b", value


def _int32_bytes(tokens: list[int]) -> bytes:
    values = array("i", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
