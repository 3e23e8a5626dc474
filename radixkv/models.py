"""Language models as far as memory and arithmetic go: what they keep of a sequence, and what a token costs.

Knows number formats and the formulas of docs/plan.md; knows nothing of files, GPUs or time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]


# Number formats


@dataclass(frozen=True, slots=True)
class Format:
    """Numbers in groups of `num_elements` that take `num_bytes` each, and a scale of `per_vector` bytes a vector."""

    num_bytes: int
    num_elements: int = 1
    per_vector: int = 0

    def size(self, num_elements: int) -> int:
        """Bytes of one vector of so many elements."""
        return -(-num_elements // self.num_elements) * self.num_bytes + self.per_vector


FORMATS = {
    "fp32": Format(4),
    "bf16": Format(2),
    "fp16": Format(2),
    "fp8": Format(1),  # one scale a tensor or a 128 x 128 tile, which is nothing
    "int8": Format(1, per_vector=4),
    "int4": Format(67, 128),  # a group of 128 with a 16-bit scale and a zero point
    "mxfp4": Format(17, 32),
    "nvfp4": Format(9, 16),
    "q8_0": Format(34, 32),
    "q5_1": Format(24, 32),
    "q5_0": Format(22, 32),
    "q4_1": Format(20, 32),
    "q4_0": Format(18, 32),
}
KV_FORMATS = [name for name in FORMATS if name != "int4"]
WEIGHT_FORMATS = ["fp32", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4", "nvfp4"]


# Models


@dataclass(frozen=True, slots=True)
class Layers:
    """`num` layers that are alike in what they keep of a sequence, and in what attention costs there."""

    kind: str  # full, window, chunk, latent, index, linear or mamba
    num: int
    num_kv_heads: int = 1  # tensor parallelism splits them down to one a GPU; of a state, what it can be split into
    vectors: tuple[int, ...] = ()  # elements of each vector that a KV head keeps of a token
    keeps: int | None = None  # of a sequence, the last so many tokens; None: all
    attends: int | None = None  # a query, to so many tokens at most; None: all
    prefill_flops: int = 0  # a query token and a token attended to
    decode_flops: int = 0
    state_elements: int = 0  # kept once a sequence, in the state's format
    conv_elements: int = 0  # kept once a sequence, in the model's format


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of all layers that are stored, split and used alike."""

    part: str  # embedding, head, attention, mixer, mlp, experts, shared, router or small
    num: int
    num_active: int  # those that a token is multiplied with
    pieces: int = 0  # that tensor parallelism can split them into; 0: any number, 1: each GPU has all


LINEAR_PARTS = frozenset({"attention", "mixer", "mlp", "experts", "shared"})  # what quantisation covers
_STATE_FLOPS = 6  # an element of a state and a token: decay, update and read, a multiplication and an addition each


@dataclass(frozen=True)
class Model:
    """A model as far as memory and arithmetic go. `radixkv.configs` makes it from a `config.json`."""

    name: str
    num_heads: int
    layers: tuple[Layers, ...]
    weights: tuple[Weights, ...]
    why_no_weights: str  # names the field that is missing, where `weights` is empty
    experts: tuple[int, int]  # how many a token uses, and how many there are; (0, 0) without
    dtype: str  # of activations, and of KV unless told otherwise
    state_dtype: str
    formats: Mapping[str, str]  # of those parts of the weights that are not in `dtype`
    notes: tuple[str, ...] = ()  # what was assumed in reading the config

    @property
    def num_parameters(self) -> int:
        return sum(part.num for part in self.weights)

    @property
    def num_active_parameters(self) -> int:
        """Those that a token is multiplied with: without the embedding's table, with the head."""
        return sum(part.num_active for part in self.weights)

    def kv_bytes_per_token(self, kv_format: str, *, tp: int = 1, beyond_windows: bool = False) -> int:
        """Bytes that a token's KV takes on each of `tp` GPUs.

        In all layers, as a block of the cache keeps it; or in those only that still keep a token that has left all
        windows, which is what a long context grows by.
        """
        return sum(kv_bytes(layers, kv_format, tp) for layers in self.layers if not (beyond_windows and layers.keeps))

    def request_bytes(self, num_tokens: int, kv_format: str, *, tp: int = 1, block_size: int = 1) -> int:
        """Bytes that a sequence takes on each of `tp` GPUs: whole blocks, those out of the windows given back."""
        total = 0
        for layers in self.layers:
            kept = num_tokens if layers.keeps is None else min(num_tokens, layers.keeps)
            total += -(-kept // block_size) * block_size * kv_bytes(layers, kv_format, tp)
        return total + self.state_bytes(tp=tp)

    def state_bytes(self, *, tp: int = 1) -> int:
        """Bytes that a sequence of any length takes on each of `tp` GPUs."""
        total = 0
        for layers in self.layers:
            state = layers.state_elements * FORMATS[self.state_dtype].num_bytes
            state += layers.conv_elements * FORMATS[self.dtype].num_bytes
            total += layers.num * -(-state * _share(layers.num_kv_heads, tp) // layers.num_kv_heads)
        return total

    def weight_bytes(self, weight_format: str | None = None, *, tp: int = 1) -> float:
        """Bytes of weights that each of `tp` GPUs holds; what cannot be split is on all of them.

        `weight_format` is that of the linear layers, instead of what the config says.
        """
        return sum(part.num * self._bytes_of_one(part, weight_format, tp) for part in self.weights)

    def read_bytes(self, num_tokens: ArrayLike, weight_format: str | None = None, *, tp: int = 1) -> Floats:
        """Bytes of weights that a pass over so many tokens reads on each of `tp` GPUs.

        Of the embedding's table nothing to speak of, and of the experts those that some token uses, where each takes
        its own at random.
        """
        used, there = self.experts
        share = 1 - np.power(1 - used / there, np.asarray(num_tokens, np.float64)) if there else 1.0
        total = np.zeros(np.shape(num_tokens))
        for part in self.weights:
            num = part.num_active if part.part in ("embedding", "head") else part.num
            total += num * self._bytes_of_one(part, weight_format, tp) * (share if part.part == "experts" else 1.0)
        return total

    def _bytes_of_one(self, part: Weights, weight_format: str | None, tp: int) -> float:
        """What a parameter takes on each GPU, on average."""
        form = FORMATS[self.format_of(part.part, weight_format)]
        return form.num_bytes / form.num_elements * (_share(part.pieces, tp) / part.pieces if part.pieces else 1 / tp)

    def prefill_flops(self, new: ArrayLike, cached: ArrayLike = 0) -> tuple[Floats, Floats]:
        """FLOPs of the linear layers and of attention to prefill `new` tokens behind `cached` ones, and one logit."""
        new, cached = np.asarray(new, np.float64), np.asarray(cached, np.float64)
        head = sum(part.num_active for part in self.weights if part.part == "head")
        dense = 2 * ((self.num_active_parameters - head) * new + head)
        attention = np.zeros(np.shape(dense))
        for layers in self.layers:
            pairs = _pairs(new + cached, layers) - _pairs(cached, layers)
            attention += layers.num * (layers.prefill_flops * pairs + _STATE_FLOPS * layers.state_elements * new)
        return dense, attention

    def decode_flops(self, context: ArrayLike) -> tuple[Floats, Floats]:
        """FLOPs of the linear layers and of attention for one more token behind `context` ones."""
        context = np.asarray(context, np.float64)
        attention = np.zeros(np.shape(context))
        for layers in self.layers:
            attended = context if layers.attends is None else np.minimum(context, layers.attends)
            attention += layers.num * (layers.decode_flops * attended + _STATE_FLOPS * layers.state_elements)
        return np.full_like(context, 2.0 * self.num_active_parameters), attention

    def format_of(self, part: str, weight_format: str | None = None) -> str:
        if weight_format and part in LINEAR_PARTS:
            return weight_format
        return self.formats.get(part, self.dtype)


def kv_bytes(layers: Layers, kv_format: str, tp: int) -> int:
    """Of a token, in these layers, on each GPU."""
    form = FORMATS["int8" if layers.kind == "index" else kv_format]  # an index is always 8 bits and a scale
    return layers.num * _share(layers.num_kv_heads, tp) * sum(form.size(elements) for elements in layers.vectors)


def _pairs(num_tokens: Floats, layers: Layers) -> Floats:
    """Pairs of a query and a token it attends to, itself included, among the first tokens of a sequence."""
    if layers.attends is None:
        return num_tokens * (num_tokens + 1) / 2
    near: Floats = np.minimum(num_tokens, layers.attends)
    if layers.kind == "chunk":
        whole = num_tokens // layers.attends
        rest = num_tokens - whole * layers.attends
        return whole * layers.attends * (layers.attends + 1) / 2 + rest * (rest + 1) / 2
    return near * (near + 1) / 2 + (num_tokens - near) * layers.attends


def _share(pieces: int, tp: int) -> int:
    """How many of the pieces each GPU holds: at least one, so that some are held more than once."""
    return -(-pieces // tp)
