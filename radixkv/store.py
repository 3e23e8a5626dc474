"""The bytes of K and V, in blocks of slots. Knows nothing of tokens, pins or models.

slot = block x block_size + offset. Needs torch and nothing else of this package.
"""

import os
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, Union

import torch

Blocks: TypeAlias = Union[Sequence[int], "array[int]", torch.Tensor]
KV: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# largest magnitude that the stored type holds; what is stored is x / scale, scale = amax / limit
_LIMITS = {"int8": 127.0, "fp8": 448.0}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class KVStore:
    """One K and one V tensor a layer, `(num_blocks, block_size, num_kv_heads, head_dim)` each.

    A layer is allocated by the first K and V written to it, which fix its dtype, device, heads and head_dim; K and V
    may differ, and layers may. With `quantize` a scale per token and head is kept beside; x is read back as x' with

    - "int8": |x - x'| <= amax / 254, where amax is the largest magnitude of that token and head,
    - "fp8" (e4m3): |x - x'| <= max(|x| / 16, amax / 458,752),

    plus the rounding to the dtype of K and V; magnitudes below 1e-30 may become 0. A byte an element and four a token
    and head: 0.53 of bf16 at head_dim 64.
    Reading is deterministic, so a hit served twice is the same twice.

    Takes no lock. Threads may read and write different blocks at once, but not two of them the first of a layer.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, quantize: str | None = None) -> None:
        """An empty store; allocates nothing yet. `quantize` is None, "int8" or "fp8".

        Raises: ValueError for sizes that are not positive and for another `quantize`.
        """
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if quantize is not None and quantize not in _LIMITS:
            raise ValueError(f"quantize must be None, 'int8' or 'fp8', got {quantize!r}")
        if quantize == "fp8" and not hasattr(torch, "float8_e4m3fn"):
            raise ValueError(f"quantize='fp8' needs a torch with float8_e4m3fn, this is {torch.__version__}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.quantize = quantize
        self._layers: dict[int, tuple[_Slots, _Slots]] = {}

    @classmethod
    def fitting(
        cls,
        max_bytes: int | str,
        block_size: int,
        layers: Sequence[KV],
        *,
        min_tokens: int = 1,
        quantize: str | None = None,
    ) -> "KVStore":
        """A store of as many blocks as fit in `max_bytes` (see `parse_bytes`), all its layers allocated.

        `layers` has one K and V a layer, as `write` takes them, of any number of tokens, to take the shapes from.

        Raises: ValueError where `min_tokens`, the shortest prompt worth caching, do not fit.
        """
        if not layers:
            raise ValueError("layers must have at least 1 layer, got 0")
        num_bytes = parse_bytes(max_bytes, layers[0][0].device)
        per_token = sum(_bytes_per_token(side, quantize) for kv in layers for side in kv)
        num_blocks, needed = num_bytes // (per_token * block_size), -(-min_tokens // block_size)
        if num_blocks < needed:
            raise ValueError(
                f"max_bytes={max_bytes!r} is {num_bytes:,} bytes, but a prompt of {min_tokens} tokens needs "
                f"{needed * block_size * per_token:,}: {needed} blocks of {block_size} tokens of {per_token:,} bytes"
            )
        store = cls(num_blocks, block_size, quantize=quantize)
        for layer, (k, v) in enumerate(layers):
            store._allocate(layer, k, v)
        return store

    @property
    def num_layers(self) -> int:
        """Layers allocated."""
        return len(self._layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, over all layers allocated, scales included."""
        return sum(side.bytes_per_token for kv in self._layers.values() for side in kv)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.bytes_per_token * self.num_blocks * self.block_size

    def slot_mapping(self, block_table: Blocks, start: int, end: int) -> torch.Tensor:
        """The slots of positions [start, end) of a sequence: `(end - start,)` int64, on the CPU.

        Where the store is on another device, move it there once rather than in every `write`.
        """
        size = self.block_size
        blocks = _indices(block_table)
        if not 0 <= start <= end <= len(blocks) * size:
            raise ValueError(f"positions [{start}, {end}) are not within the {len(blocks) * size} slots of the table")
        positions = torch.arange(start, end)
        return blocks.cpu()[positions // size] * size + positions % size

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V, `(num_tokens, num_kv_heads, head_dim)`, to `slots`, `(num_tokens,)` int64, all different.

        Raises: ValueError where shape, dtype or device are not the layer's, and for a slot that does not exist.
        """
        if not slots.is_cuda:  # there it would wait for the device, which checks by itself
            self._check_range("slots", slots, self.num_blocks * self.block_size)
        sides = self._layers.get(layer)
        if sides is None:
            self._check_shapes(layer, k, v, slots)
            sides = self._allocate(layer, k, v)
        for name, side, x in (("k", sides[0], k), ("v", sides[1], v)):
            if x.shape[1:] != side.shape or x.dtype != side.dtype or x.device != side.device or len(x) != len(slots):
                raise ValueError(
                    f"layer {layer}: {name} must be ({len(slots)}, {', '.join(map(str, side.shape))}) {side.dtype} "
                    f"on {side.device}, got {tuple(x.shape)} {x.dtype} on {x.device}"
                )
        slots = slots.to(sides[0].device)
        for side, x in zip(sides, (k, v), strict=True):
            side.write(slots, x)

    def read(self, layer: int, blocks: Blocks, num_tokens: int, out: KV | None = None) -> KV:
        """K and V of the first `num_tokens` tokens in `blocks`, `(num_tokens, num_kv_heads, head_dim)` each: copies.

        `out` is written to instead, where given: two tensors of that shape, strided as they may be.
        """
        indices = _indices(blocks)
        num_blocks = -(-num_tokens // self.block_size)
        if not 0 <= num_tokens <= len(indices) * self.block_size:
            raise ValueError(f"num_tokens must be in [0, {len(indices) * self.block_size}], got {num_tokens}")
        if layer not in self._layers:
            raise ValueError(f"layer {layer} holds nothing; {self.num_layers} layers do")
        sides = self._layers[layer]
        indices = indices[:num_blocks].to(sides[0].device)
        try:
            k, v = (side.read(indices, num_tokens) for side in sides)
        except (IndexError, RuntimeError) as error:
            self._check_range("blocks", indices, self.num_blocks)
            raise error
        if out is None:
            return k, v
        for x, target in zip((k, v), out, strict=True):
            if x.shape != target.shape:
                raise ValueError(f"layer {layer}: out must be {tuple(x.shape)}, got {tuple(target.shape)}")
            target.copy_(x)
        return out

    def copy(self, src_blocks: Blocks, dst_blocks: Blocks) -> None:
        """Copy whole blocks in every layer, `src_blocks[i]` to `dst_blocks[i]`; as if all were read first."""
        src, dst = _indices(src_blocks), _indices(dst_blocks)
        if len(src) != len(dst):
            raise ValueError(f"src_blocks and dst_blocks must be as many, got {len(src)} and {len(dst)}")
        self._check_range("src_blocks", src, self.num_blocks)
        self._check_range("dst_blocks", dst, self.num_blocks)
        for sides in self._layers.values():
            for side in sides:
                side.copy(src.to(side.device), dst.to(side.device))

    def _allocate(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> "tuple[_Slots, _Slots]":
        sides = (
            _Slots(self.num_blocks, self.block_size, k, self.quantize),
            _Slots(self.num_blocks, self.block_size, v, self.quantize),
        )
        self._layers[layer] = sides
        return sides

    def _check_shapes(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 3 or len(x) != len(slots) or not x.is_floating_point():
                raise ValueError(
                    f"layer {layer}: {name} must be ({len(slots)}, num_kv_heads, head_dim) of floats, "
                    f"got {tuple(x.shape)} {x.dtype}"
                )

    def _check_range(self, name: str, indices: torch.Tensor, bound: int) -> None:
        if len(indices):
            low, high = (int(x) for x in indices.aminmax())
            if low < 0 or high >= bound:
                raise ValueError(f"{name} must be in [0, {bound}), got {low if low < 0 else high}")

    def __repr__(self) -> str:
        return (
            f"KVStore(num_blocks={self.num_blocks}, block_size={self.block_size}, quantize={self.quantize!r}, "
            f"layers={self.num_layers}, num_bytes={self.num_bytes:,})"
        )


class _Slots:
    """K or V of one layer: `data`, and `scales` where it is quantised, as `(num_blocks, block_size, heads, dim)`."""

    __slots__ = ("_data", "_limit", "_scales", "_stored", "dtype", "shape")

    def __init__(self, num_blocks: int, block_size: int, like: torch.Tensor, quantize: str | None) -> None:
        self.shape = like.shape[1:]
        self.dtype = like.dtype
        self._limit = _LIMITS[quantize] if quantize else 0.0
        self._stored = _stored_dtype(like.dtype, quantize)
        # subtle: fp8 is kept as bytes, for which every index operation exists
        raw = torch.uint8 if quantize == "fp8" else self._stored
        shape = (num_blocks, block_size, *self.shape)
        self._scales: torch.Tensor | None = None
        with torch.inference_mode(False):  # else only inference mode could ever write to it
            self._data = torch.empty(shape, dtype=raw, device=like.device)
            if quantize:
                self._scales = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=like.device)

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def bytes_per_token(self) -> int:
        return sum(x[0, 0].nbytes for x in (self._data, self._scales) if x is not None)

    @torch.no_grad()
    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        if self._scales is not None:
            x = x.float()
            scales = x.abs().amax(-1, keepdim=True) / self._limit  # (num_tokens, heads, 1)
            x = x / torch.where(scales > 0, scales, 1)
            x = (x.round() if self._stored is torch.int8 else x).clamp(-self._limit, self._limit).to(self._stored)
            self._scales.flatten(0, 1).index_copy_(0, slots, scales)
        self._data.flatten(0, 1).index_copy_(0, slots, x.view(self._data.dtype) if self._limit else x)

    @torch.no_grad()
    def read(self, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        x = self._data.index_select(0, blocks).flatten(0, 1)[:num_tokens]
        if self._scales is not None:
            scales = self._scales.index_select(0, blocks).flatten(0, 1)[:num_tokens]
            x = (x.view(self._stored).float() * scales).to(self.dtype)
        return x

    @torch.no_grad()
    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for x in (self._data, self._scales):
            if x is not None:
                x.index_copy_(0, dst, x.index_select(0, src))


def parse_bytes(size: int | str, device: torch.device | str = "cpu") -> int:
    """A size in bytes: an int, "1GiB", "1.5 GB", or "40%" of what is free on `device` now.

    Raises: ValueError for another form, for nothing, and for a share of a device that does not say what is free.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", size) if isinstance(size, str) else None
        unit = match[2].upper() if match else ""
        if match is None or (unit != "%" and unit not in _UNITS):
            raise ValueError(
                f"a size must be bytes, such as 2**30, '1GiB', '1.5GB' or '40%' of what is free, got {size!r}"
            )
        if unit == "%" and float(match[1]) > 100:
            raise ValueError(f"a share of what is free must be at most 100%, got {size!r}")
        num_bytes = (
            int(float(match[1]) / 100 * free_bytes(device)) if unit == "%" else int(float(match[1]) * _UNITS[unit])
        )
    if num_bytes < 1:
        raise ValueError(f"a size must be at least 1 byte, got {size!r}")
    return num_bytes


def free_bytes(device: torch.device | str) -> int:
    """Bytes that can still be allocated on `device`: CUDA's own figure; what Linux calls available, within a cgroup.

    Raises: ValueError for a device that does not say.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if kind != "cpu":
        raise ValueError(f"device {device} does not say how much is free: give a size in bytes")
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = int(available[1]) * 1024 if available else _physical_bytes()
    except OSError:
        free = _physical_bytes()
    try:
        group = Path("/sys/fs/cgroup")
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no cgroup, or one without a limit
        return free


def _physical_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _stored_dtype(dtype: torch.dtype, quantize: str | None) -> torch.dtype:
    if quantize is None:
        return dtype
    return torch.int8 if quantize == "int8" else torch.float8_e4m3fn


def _bytes_per_token(x: torch.Tensor, quantize: str | None) -> int:
    """Bytes of one token of K or V `(num_tokens, heads, dim)` as stored."""
    heads, dim = x.shape[1:]
    return int(heads * (dim * _stored_dtype(x.dtype, quantize).itemsize + (4 if quantize else 0)))


def _indices(blocks: Any) -> torch.Tensor:
    """Block ids as an int64 tensor: tensors as they are, `array` and numpy by their buffer."""
    if isinstance(blocks, torch.Tensor):
        return blocks.to(torch.int64)
    if isinstance(blocks, array):
        if not len(blocks):
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(blocks, dtype=torch.int32 if blocks.itemsize == 4 else torch.int64).to(torch.int64)
    return torch.as_tensor(blocks, dtype=torch.int64)
