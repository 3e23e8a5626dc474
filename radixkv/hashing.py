"""Ids of whole blocks for the outside world: a rolling XXH3-64 over their tokens. Needs xxhash (the extra `events`).

Inside the process tokens are compared; nothing here decides what matches. The chain is the one that Dynamo and the
proposals for KV indexers share: `local = XXH3(tokens as little-endian u32)`, the first id is the first `local`, each
further one `XXH3(id before as LE u64 || local as LE u64)`, all with one seed. A namespace has a seed of its own.
"""

import struct
from collections.abc import Hashable

from xxhash import xxh3_64_intdigest

from radixkv.tokens import TOKEN_BYTES

SEED = 1337
_MARK = "radixkv:"  # in front of the salt of what is no plain string
_KINDS = "None, a str, int, bytes or bool, or a tuple of these"
_MAX_INT = 1 << 256
_MAX_DEPTH = 16


def block_hashes(tokens: bytes, block_size: int, *, parent: int | None = None, seed: int = SEED) -> list[int]:
    """The 64-bit ids of the whole blocks of packed tokens (see `radixkv.tokens`) that continue block `parent`.

    About 0.2 us a block of 16 tokens.
    """
    width = block_size * TOKEN_BYTES
    digest, pack = xxh3_64_intdigest, _PAIR.pack
    hashes = []
    for start in range(0, len(tokens) - width + 1, width):
        local = digest(tokens[start : start + width], seed)
        parent = local if parent is None else digest(pack(parent, local), seed)
        hashes.append(parent)
    return hashes


def namespace_salt(namespace: Hashable) -> str | None:
    """What a namespace is called on the wire: a string is its own salt, None has none.

    Other values are spelled out: `7` is "radixkv:7", `("lora", 7)` "radixkv:('lora', 7)". No two namespaces share a
    salt, and it is the same in every process.

    Raises: TypeError for anything else, whose text might not be the same in another process; ValueError for an
    integer beyond 256 bits or tuples more than 16 deep.
    """
    if namespace is None:
        return None
    if type(namespace) is str and namespace and not namespace.startswith(_MARK) and _is_utf8(namespace):
        return namespace
    _check(namespace, namespace, 0)
    return f"{_MARK}{namespace!a}"  # not repr, which knows more letters in a newer Python


def salt_seed(salt: str | None) -> int:
    """The seed of the chain under a salt; SEED without one. (Dynamo derives that of an adapter's name in this way.)"""
    return SEED if salt is None else (SEED + xxh3_64_intdigest(salt.encode())) & _MAX


_PAIR = struct.Struct("<QQ")
_MAX = 2**64 - 1


def _check(part: object, namespace: object, depth: int) -> None:
    if type(part) is tuple:
        if depth == _MAX_DEPTH:
            raise ValueError(f"namespace must be at most {_MAX_DEPTH} tuples deep where events are on, got more")
        for inner in part:
            _check(inner, namespace, depth + 1)
    elif type(part) is int:
        if not -_MAX_INT < part < _MAX_INT:
            raise ValueError("an int in a namespace must be at most 256 bits where events are on, got more")
    elif part is not None and type(part) not in (str, bytes, bool):
        raise TypeError(f"namespace must be {_KINDS} where events are on, got {namespace!r}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
