"""What fits on GPUs, how long prefill and decode take there, how many GPUs it takes, and what the tokens cost.

Knows GPUs and the roofline of docs/plan.md; of traces only the lengths of requests, and how many tokens a cache hits.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from radixkv.curve import Curve
from radixkv.models import KV_FORMATS, WEIGHT_FORMATS, Floats, Model, kv_bytes
from radixkv.trace import Progress, Trace

GIB = 1 << 30
_MIB = 1 << 20

MAX_BATCH = 256  # requests that decode in one pass
MAX_BUSY = 0.8  # of the time: beyond, queues grow long

# GPUs


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: memory as its driver reports it, peaks as its data sheet states them, without sparsity."""

    name: str
    memory: int  # bytes
    flops: float  # FLOP/s in bf16
    flops_fp8: float  # FLOP/s; that of bf16 where fp8 is no faster
    bandwidth: float  # bytes/s


def _gpu(name: str, mib: int, tflops: float, tflops_fp8: float, gigabytes: float) -> Gpu:
    return Gpu(name, mib * _MIB, tflops * 1e12, tflops_fp8 * 1e12, gigabytes * 1e9)


GPUS = {
    "a100-40": _gpu("A100 SXM 40 GB", 40_960, 312, 312, 1555),
    "a100": _gpu("A100 SXM 80 GB", 81_920, 312, 312, 2039),
    "h100": _gpu("H100 SXM 80 GB", 81_559, 989, 1979, 3350),
    "h200": _gpu("H200 SXM 141 GB", 143_771, 989, 1979, 4800),
    "b200": _gpu("B200 SXM 180 GB", 183_359, 2250, 4500, 7700),
    "l4": _gpu("L4 24 GB", 23_034, 121, 242, 300),
    "l40s": _gpu("L40S 48 GB", 46_068, 362, 733, 864),
    "rtx4090": _gpu("RTX 4090 24 GB", 24_564, 165.2, 330.3, 1008),
    "mi300x": _gpu("MI300X 192 GB", 196_592, 1307.4, 2614.9, 5300),
}


def find_gpu(text: str) -> Gpu:
    """A GPU by its name in `GPUS`, or `GiB,TFLOPS,GB/s` for any other.

    Raises: ValueError, with what is known.
    """
    name = text.strip().lower().replace(" ", "").replace("_", "-")
    if name in GPUS:
        return GPUS[name]
    parts = text.split(",")
    try:
        memory, tflops, gigabytes = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is neither GiB,TFLOPS,GB/s nor one of {', '.join(GPUS)}") from None
    if not all(0 < value < 1e9 for value in (memory, tflops, gigabytes)):
        raise ValueError(f"{text[:40]!r}: GiB, TFLOPS and GB/s must each be above 0 and below 1e9")
    return Gpu(f"GPU of {memory:g} GiB", int(memory * GIB), tflops * 1e12, tflops * 1e12, gigabytes * 1e9)


# Memory and time on GPUs


@dataclass(frozen=True)
class Deployment:
    """A model on `tp` GPUs that hold and compute it together, and the assumptions under which it is judged.

    Raises: ValueError for a `tp` that cannot split the model's heads, an unknown format, and shares outside (0, 1].
    """

    model: Model
    gpu: Gpu
    _: KW_ONLY
    tp: int = 1
    kv_format: str = ""  # "": the model's dtype
    weight_format: str | None = None  # of the linear layers; None: the config's
    block_size: int = 16  # tokens
    utilization: float = 0.9  # of the GPU's memory, what is used at all
    reserve: int = 2 * GIB  # of that on each GPU, for activations, graphs and the driver
    compute_efficiency: float = 0.5  # of the peak FLOP/s
    bandwidth_efficiency: float = 0.8  # of the peak bytes/s

    def __post_init__(self) -> None:
        if not fits_heads(self.model, self.tp):
            raise ValueError(
                f"tp must divide the {self.model.num_heads} attention heads, and the KV heads or be divided by them, "
                f"got {self.tp}"
            )
        if not self.kv_format:
            object.__setattr__(self, "kv_format", self.model.dtype)
        for name, value, known in (
            ("kv_format", self.kv_format, KV_FORMATS),
            ("weight_format", self.weight_format, [None, *WEIGHT_FORMATS]),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(filter(None, known))}, got {value!r}")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        for name in ("utilization", "compute_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")

    # Memory, on each GPU

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """In all layers."""
        return self.model.kv_bytes_per_token(self.kv_format, tp=self.tp)

    @cached_property
    def weight_bytes(self) -> float:
        return self.model.weight_bytes(self.weight_format, tp=self.tp)

    @property
    def pool_bytes(self) -> int:
        """What is left for KV; below zero if not even the weights fit."""
        return int(self.gpu.memory * self.utilization - self.weight_bytes) - self.reserve

    @property
    def num_blocks(self) -> int:
        """Blocks of all layers that fit; 0 too for a model that keeps nothing by the token."""
        block = self.block_size * self.kv_bytes_per_token
        return max(0, self.pool_bytes) // block if block else 0

    def request_bytes(self, num_tokens: int) -> int:
        return self.model.request_bytes(num_tokens, self.kv_format, tp=self.tp, block_size=self.block_size)

    def num_requests(self, num_tokens: int) -> int:
        """How many requests of so many tokens each, prompt and output, fit at once."""
        return max(0, self.pool_bytes) // self.request_bytes(num_tokens)

    # Time

    def prefill_seconds(self, new: ArrayLike, cached: ArrayLike = 0) -> Floats:
        """Of one pass over `new` tokens behind `cached` ones, alone: the slower of arithmetic and memory."""
        new, cached = np.asarray(new, np.float64), np.asarray(cached, np.float64)
        dense, attention = self.model.prefill_flops(new, cached)
        read = self.model.read_bytes(new, self.weight_format, tp=self.tp)
        return self._seconds(dense, attention, read + self._kv_read(new + cached))

    def decode_seconds(self, context: ArrayLike, batch: ArrayLike = 1) -> Floats:
        """Of one pass that gives each of `batch` requests, with `context` tokens each, a token more."""
        context, batch = np.asarray(context, np.float64), np.asarray(batch, np.float64)
        dense, attention = self.model.decode_flops(context)
        read = self.model.read_bytes(batch, self.weight_format, tp=self.tp)
        return self._seconds(batch * dense, batch * attention, read + batch * self._kv_read(context))

    def _seconds(self, dense: Floats, attention: Floats, read: Floats) -> Floats:
        compute = dense / self.dense_flops + attention / self.gpu.flops
        return np.maximum(
            compute / (self.tp * self.compute_efficiency), read / (self.gpu.bandwidth * self.bandwidth_efficiency)
        )

    def _kv_read(self, num_tokens: Floats) -> Floats:
        """Bytes of a sequence's KV that a pass reads, on each GPU."""
        read = np.zeros_like(num_tokens)
        for layers in self.model.layers:
            attended = num_tokens if layers.attends is None else np.minimum(num_tokens, layers.attends)
            read = read + attended * kv_bytes(layers, self.kv_format, self.tp)
        return read + 2 * self.model.state_bytes(tp=self.tp)

    @property
    def dense_flops(self) -> float:
        """Peak FLOP/s of the linear layers: of fp8 where their weights are in fp8 or nvfp4."""
        part = "experts" if self.model.experts[1] else "mlp"
        quick = self.model.format_of(part, self.weight_format) in ("fp8", "nvfp4")
        return self.gpu.flops_fp8 if quick else self.gpu.flops


def fits_heads(model: Model, tp: int) -> bool:
    """Whether `tp` splits the heads evenly, KV heads being held more than once where there are too few."""
    if tp < 1 or model.num_heads % tp:
        return False
    return all(heads % tp == 0 or tp % heads == 0 for heads in _head_counts(model))


def _head_counts(model: Model) -> list[int]:
    """Of KV heads, where there are any: a latent has none."""
    return [layers.num_kv_heads for layers in model.layers if layers.kind in ("full", "window", "chunk")]


def deployments(model: Model, gpu: Gpu, *, tp: int | None = None, **assumptions: Any) -> list[Deployment]:
    """With each power of two of GPUs up to 64 that can split the model, or with `tp` alone, whether it fits or not.

    Raises: ValueError, see `Deployment`.
    """
    sizes = [tp] if tp else [size for size in (1, 2, 4, 8, 16, 32, 64) if fits_heads(model, size)]
    return [Deployment(model, gpu, tp=size, **assumptions) for size in sizes]


# A workload and what a cache does for it


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by their lengths, and what a cache of so many blocks holds of each prompt."""

    prompts: Floats  # tokens, (requests,)
    outputs: Floats  # tokens, (requests,)
    cached: Callable[[int | None], Floats]  # tokens, (requests,); by capacity in blocks, None for no bound
    block_size: int = 1  # tokens
    most_blocks: int = 0  # a larger cache hits no more
    seconds: float = 0.0  # from the first request to the last; 0 where that is not known

    @property
    def rate(self) -> float:
        """Requests a second; 0 where that is not known."""
        return (len(self.prompts) - 1) / self.seconds if self.seconds else 0.0

    @property
    def mean_context(self) -> int:
        """Tokens that a mean request has at its end."""
        return math.ceil(float(self.prompts.mean() + self.outputs.mean()))

    def without_cache(self) -> "Workload":
        """The same requests where nothing is ever hit."""
        return replace(self, cached=lambda capacity: np.zeros_like(self.prompts), most_blocks=0)

    def prefill_flops(self, model: Model, capacity: int | None) -> float:
        """Of all requests."""
        cached = self.cached(capacity)
        dense, attention = model.prefill_flops(self.prompts - cached, cached)
        return float((dense + attention).sum())

    def ttft(self, deployment: Deployment, capacity: int | None) -> Floats:
        """Seconds to the first token of each request, without waiting for others."""
        cached = self.cached(capacity)
        return deployment.prefill_seconds(self.prompts - cached, cached)

    def itl(self, deployment: Deployment, batch: int) -> float:
        """Seconds from token to token in a batch of mean requests that are half way through their answers."""
        return float(deployment.decode_seconds(self.prompts.mean() + self.outputs.mean() / 2, batch))

    def batch(self, deployment: Deployment, most: int = MAX_BATCH) -> int:
        """How many mean requests fit at once, at least one and at most `most`."""
        return min(most, max(1, deployment.num_requests(self.mean_context)))

    def busy_seconds(self, deployment: Deployment, capacity: int | None, batch: int) -> float:
        """What a mean request takes of a deployment's time: its prefill, and its share of the passes of a batch."""
        decode = float(self.outputs.mean()) * self.itl(deployment, batch) / batch
        return float(self.ttft(deployment, capacity).mean()) + decode


def one_request(prompt: int, output: int, *, cached: int = 0) -> Workload:
    """Requests that are all alike, whatever the capacity; at least one token is left to prefill."""
    hit = np.array([min(cached, prompt - 1)], np.float64)
    return Workload(np.array([prompt], np.float64), np.array([output], np.float64), lambda capacity: hit)


def trace_workload(trace: Trace, *, progress: Progress | None = None) -> Workload:
    """The requests of a trace, and what LRU hits of them. The cost is that of `radixkv.curve.Curve`."""
    curve = Curve(trace, progress=progress)
    prompts = np.array([request.num_prompt_tokens for request in trace.requests], np.float64)
    times = [request.time for request in trace.requests]

    def cached(capacity: int | None) -> Floats:
        return np.clip(curve.lru_hits(capacity) * trace.block_size, 0, np.maximum(prompts - 1, 0))

    return Workload(
        prompts,
        np.array([request.num_output_tokens for request in trace.requests], np.float64),
        cached,
        block_size=trace.block_size,
        most_blocks=curve.capacity_for(1),
        seconds=max(times) - min(times),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request takes: prefill alone, then a pass for each token of its output."""

    cached_tokens: int
    prefill_flops: float
    ttft_s: float
    batch: int  # requests that decode with it
    itl_s: float
    total_s: float


def estimate(deployment: Deployment, prompt: int, output: int, *, cached: int = 0, batch: int = 1) -> Estimate:
    """Of a request with so many tokens in its prompt, of which some are cached, and in its output."""
    request = one_request(prompt, output, cached=cached)
    ttft, itl = float(request.ttft(deployment, None)[0]), request.itl(deployment, batch)
    flops = request.prefill_flops(deployment.model, None)
    return Estimate(cached, flops, ttft, batch, itl, ttft + output * itl)


@dataclass(frozen=True, slots=True)
class Served:
    """What a cache of one capacity does for a workload."""

    capacity_blocks: int | None
    hit_tokens: int
    prompt_tokens: int
    prefill_flops: float
    saved_flops: float
    ttft_s: float  # mean
    ttft_p90_s: float
    bill: float | None


def serve(
    deployment: Deployment, workload: Workload, capacity: int | None, *, prices: "Prices | None" = None
) -> Served:
    """Run a workload's prompts behind a cache of so many of its blocks, or without bound."""
    hits, prompts = workload.cached(capacity).sum(), workload.prompts.sum()
    flops = workload.prefill_flops(deployment.model, capacity)
    ttft = workload.ttft(deployment, capacity)
    return Served(
        capacity,
        int(hits),
        int(prompts),
        flops,
        workload.without_cache().prefill_flops(deployment.model, None) - flops,
        float(ttft.mean()),
        float(np.percentile(ttft, 90)),
        prices.bill(int(prompts), int(hits), int(workload.outputs.sum())) if prices else None,
    )


# The fewest GPUs, the smallest cache


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of a service."""

    ttft_s: float | None = None  # on the mean
    rate: float = 0.0  # requests/s
    max_busy: float = MAX_BUSY  # of the time
    max_batch: int = MAX_BATCH

    def busy(self, deployment: Deployment, workload: Workload, capacity: int | None, num_replicas: int = 1) -> float:
        """The share of the time in which the replicas have something to do; above 1 it is more than they can."""
        if not self.rate:
            return 0.0
        batch = workload.batch(deployment, self.max_batch)
        return self.rate * workload.busy_seconds(deployment, capacity, batch) / num_replicas

    def is_met(self, deployment: Deployment, workload: Workload, capacity: int | None, num_replicas: int = 1) -> bool:
        """Whether so many replicas of a deployment do it with a cache of so many blocks in all of them."""
        if self.ttft_s is not None and workload.ttft(deployment, capacity).mean() > self.ttft_s:
            return False
        return self.busy(deployment, workload, capacity, num_replicas) <= self.max_busy


@dataclass(frozen=True, slots=True)
class Choice:
    """GPUs that meet a target, with the smallest cache with which they do."""

    deployment: Deployment
    num_replicas: int
    num_blocks: int  # of the cache in all replicas, of the workload's block size
    ttft_s: float  # mean
    busy: float

    @property
    def num_gpus(self) -> int:
        return self.num_replicas * self.deployment.tp


def smallest_cache(deployment: Deployment, workload: Workload, target: Target, num_replicas: int = 1) -> int | None:
    """The fewest blocks of cache, wherever they are, with which a target is met; None if no cache is enough."""
    if not target.is_met(deployment, workload, None, num_replicas):
        return None
    return _first(0, workload.most_blocks, lambda num: target.is_met(deployment, workload, num, num_replicas))


def choose(candidates: Iterable[Deployment], workload: Workload, target: Target) -> Choice | None:
    """The fewest GPUs that meet a target with the cache that fits on them; None if no candidate does.

    Replicas add up to one cache, as behind a router that knows prefixes.
    """
    choices = [_fewest_replicas(deployment, workload, target) for deployment in candidates]
    return min(filter(None, choices), key=lambda choice: choice.num_gpus, default=None)


def _fewest_replicas(deployment: Deployment, workload: Workload, target: Target) -> Choice | None:
    room = deployment.num_blocks * deployment.block_size // workload.block_size
    # with all hits that there are so many are needed, or by rounding one more; `enough` have room for a cache of them
    least = max(1, math.ceil(target.busy(deployment, workload, None) / target.max_busy))
    if not room or not target.is_met(deployment, workload, None, least + 1):
        return None
    enough = max(least + 1, -(-workload.most_blocks // room))
    num = _first(least, enough, lambda num: target.is_met(deployment, workload, num * room, num))
    num_blocks = smallest_cache(deployment, workload, target, num) or 0
    ttft = float(workload.ttft(deployment, num_blocks).mean())
    return Choice(deployment, num, num_blocks, ttft, target.busy(deployment, workload, num_blocks, num))


def _first(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The first number in [low, high] that is good, where `high` is and so is every number above a good one."""
    while low < high:
        middle = (low + high) // 2
        if good(middle):
            high = middle
        else:
            low = middle + 1
    return high


# What the tokens cost


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens each, in any currency."""

    input: float
    cached: float
    output: float

    def bill(self, prompt_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        """`cached_tokens` are those of the prompt that were hit."""
        new_tokens = prompt_tokens - cached_tokens
        return (new_tokens * self.input + cached_tokens * self.cached + output_tokens * self.output) / 1e6


# In words


def assumptions(deployment: Deployment) -> list[str]:
    """What the numbers of a deployment rest on, in words."""
    model, gpu, tp = deployment.model, deployment.gpu, deployment.tp
    peaks = f"{gpu.flops / 1e12:g} TFLOP/s in bf16"
    if gpu.flops_fp8 > gpu.flops:
        peaks += f" and {gpu.flops_fp8 / 1e12:g} in fp8"
    lines = [
        f"{gpu.name}: {gpu.memory / GIB:.1f} GiB, {gpu.bandwidth / 1e9:g} GB/s, {peaks}, dense",
        f"{deployment.utilization:.0%} of the memory is used, {deployment.reserve / GIB:g} GiB of that for "
        "activations, graphs and the driver",
        f"a pass takes what is longer: its FLOPs at {deployment.compute_efficiency:.0%} of the peak, or its bytes at "
        f"{deployment.bandwidth_efficiency:.0%} of the bandwidth",
    ]
    if deployment.dense_flops > gpu.flops:
        lines.append("linear layers with weights in fp8 or nvfp4 run at the peak of fp8, attention at that of bf16")
    if model.experts[1]:
        lines.append("experts are chosen evenly: a pass reads those that at least one of its tokens uses")
    kinds = {layers.kind for layers in model.layers}
    if tp > 1 and "latent" in kinds:
        lines.append("each GPU keeps the whole latent of every token")
    if any(heads < tp for heads in _head_counts(model)):
        lines.append("there are fewer KV heads than GPUs: each is kept more than once")
    if kinds & {"window", "chunk"}:
        lines.append("a cached block keeps all layers; a running request gives back what has left its window")
    if kinds & {"linear", "mamba"}:
        lines.append(
            f"states are kept in {model.state_dtype}; a hit needs the state at its end, which blocks do not hold"
        )
    lines += model.notes
    lines.append("not counted: communication between GPUs, scheduling, queues, speculative decoding, vision")
    return lines
