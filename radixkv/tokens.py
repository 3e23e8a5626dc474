"""Token ids as packed bytes: little-endian int32, four bytes a token. Knows nothing of blocks.

Packed tokens are compared, sliced and hashed at C speed, and copied without a Python int a token.
"""

import operator
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, Union

if sys.byteorder != "little":
    raise ImportError("radixkv packs token ids as native little-endian int32; this machine is big-endian")


class IntegerArray(Protocol):
    """Anything that numpy sees as an array: numpy, torch, jax."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


# list, tuple, range, array, packed bytes, or an array of integers
Tokens: TypeAlias = Union[Sequence[int], "array[int]", bytes, bytearray, memoryview, IntegerArray]

TOKEN_BYTES = 4
_LIMIT = 2**31
_LONG = 1 << 14  # bytes; from here on numpy's call costs less than a strided slice


def pack(tokens: Any) -> bytes:
    """Any form of tokens as packed bytes; bytes that are packed already come back as they are, without a copy.

    Lists cost about 6 ns a token, buffers a copy. Checks the form and the width; whether a value is negative is left to
    `check_range`, so that what equals a cached prefix need not be looked at twice.

    Raises: TypeError for another form, a float, a bool; ValueError for a value outside 32 bits, a second dimension, or
    bytes that are not whole tokens.
    """
    kind = type(tokens)
    if kind is bytes and not len(tokens) % TOKEN_BYTES:
        return tokens  # type: ignore[no-any-return]
    if kind is bytes or kind is bytearray or (kind is memoryview and tokens.format == "B"):
        packed = bytes(tokens)  # bytes as they are, without a copy
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"packed tokens are whole 4-byte integers, got {len(packed)} bytes")
        return packed
    if kind is list or kind is tuple or kind is range:
        return _pack_ints(tokens)
    if kind is array:
        if tokens.typecode == "i":
            return bytes(memoryview(tokens))
        return _pack_array(tokens)
    if kind is memoryview or hasattr(tokens, "__array__"):
        return _pack_array(tokens)
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray)):
        return _pack_ints([*tokens])
    raise TypeError(f"tokens must be a sequence of ints, an integer array or packed bytes, got {kind.__name__}")


def check_range(packed: bytes, start: int = 0) -> None:
    """Every token from byte `start` on is below 2^31: its top byte has no sign bit. About 0.1 ns a token.

    Raises: ValueError with the first value that is not, and its position.
    """
    if len(packed) - start > _LONG:
        import numpy as np  # here: importing radixkv stays fast

        if np.frombuffer(packed, np.int32, offset=start).min() >= 0:
            return
    tops = packed[start + TOKEN_BYTES - 1 :: TOKEN_BYTES]
    if not tops.isascii():
        position = start // TOKEN_BYTES + next(i for i, top in enumerate(tops) if top > 127)
        raise ValueError(f"token {unpack_token(packed, position)} at position {position} is outside [0, 2^31)")


def check_token(token: Any, position: int) -> int:
    """One token id as an int in [0, 2^31). Raises: TypeError or ValueError with the value and its position."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"token {token!r} at position {position} is a {type(token).__name__}, not an int")
    if not 0 <= token < _LIMIT:
        raise ValueError(f"token {token} at position {position} is outside [0, 2^31)")
    return operator.index(token)


def unpack_token(packed: bytes, position: int) -> int:
    """The token at `position`."""
    (token,) = struct.unpack_from("<i", packed, position * TOKEN_BYTES)
    return int(token)


def common_units(key: bytes | bytearray, pos: int, edge: bytearray, unit: int) -> int:
    """How many whole units of `unit` bytes `key` from byte `pos` on shares with the start of `edge`.

    Bisection with one memcmp a step: O(len(edge)) bytes compared, O(log) steps.
    """
    view = memoryview(edge)
    low, high = 0, min(len(edge), len(key) - pos) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(view[low * unit : middle * unit], pos + low * unit):
            low = middle
        else:
            high = middle - 1
    return low


def _pack_ints(tokens: Sequence[int]) -> bytes:
    try:
        packed = struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error:
        for position, token in enumerate(tokens):
            check_token(token, position)
        raise
    if packed and type(tokens) is not range:
        import numpy as np  # here: importing radixkv stays fast

        ids = np.frombuffer(packed, np.uint32)
        if ids.min() < 2:  # subtle: struct takes True for 1 and False for 0
            for position in np.flatnonzero(ids < 2).tolist():
                check_token(tokens[position], position)
    return packed


def _pack_array(tokens: Any) -> bytes:
    import numpy as np

    ids = np.asarray(tokens.cpu() if hasattr(tokens, "cpu") else tokens)
    if ids.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {tuple(ids.shape)}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, got an array of {ids.dtype}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= _LIMIT):
        position = int(np.flatnonzero((ids < 0) | (ids >= _LIMIT))[0])
        raise ValueError(f"token {ids[position]} at position {position} is outside [0, 2^31)")
    return ids.astype("<i4").tobytes()
