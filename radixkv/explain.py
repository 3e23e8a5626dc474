"""Where the prompt tokens of a trace went, each in exactly one class, and what hid those that were there.

| class | a prompt token that |
|---|---|
| `hit` | was cached, in a whole block |
| `capacity` | was cached once, and had to go |
| `block_rounding` | is known from the start of its prompt on, but not as a part of a whole block |
| `last_token` | is known, but needed for its logits |
| `namespace` | is known from the start of its prompt on, under another namespace |
| `broken_prefix` | is in a run of at least 32 tokens that came before, behind something else |
| `cold` | came for the first time |

Known is what a prompt or an answer before had, as far as its KV is written: all but the last token of an answer. Ids
say nothing of what stands behind a difference, so a trace of ids has no broken prefix: it counts as cold.
"""

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.curve import Curve
from radixkv.findings import Finding, Findings
from radixkv.prompts import TokenRequest, TokenRequests
from radixkv.repeats import Repeats
from radixkv.replay import replayed
from radixkv.text_trace import parts_of
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import IdTrace, Progress, TokenTrace, Trace

SHARES = (0.5, 0.9, 1.0)  # of the tokens lost for want of capacity, for which a capacity is told


@dataclass(slots=True)
class TokenCounts:
    """Prompt tokens by class; `prompt` is their sum."""

    prompt: int = 0
    hit: int = 0
    cold: int = 0
    capacity: int = 0
    broken_prefix: int = 0
    block_rounding: int = 0
    last_token: int = 0
    namespace: int = 0


@dataclass(frozen=True, slots=True)
class Explained:
    """Where the prompt tokens went, and why."""

    tokens: TokenCounts
    findings: list[Finding]
    keeping: list[tuple[float, int]]  # (share of the tokens lost for want of capacity, blocks that would keep it)


def explain(
    trace: Trace, capacity: int | None = None, *, ttl: float | None = None, progress: Progress | None = None
) -> Explained:
    """Explain the hits and misses of a cache of `capacity` blocks, least recently used first to go; None for no bound.

    `ttl`: what was not used for so many seconds is gone too. Hits are those of `replay`. Cost: some 0.1 us a token that
    was not there before, 30 us a request, and a few ms for each that is compared with another. Memory: some 40 bytes a
    distinct token; with a capacity or a ttl, that of a `Curve` too.

    Raises: ValueError for a capacity below 1, a ttl that is not positive, or one for a trace without times.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, got {capacity}")
    if ttl is not None and ttl <= 0:
        raise ValueError(f"ttl must be positive, got {ttl:g} s")
    curve = None if capacity is None and ttl is None else Curve(trace)
    if curve is not None and ttl is not None and not np.ptp(curve.prompts.times):
        raise ValueError(f"{trace.name} has no times")
    bounds = [] if capacity is None else [(hit for _, hit in replayed(trace, capacity))]
    if curve is not None and ttl is not None:
        bounds.append(iter(curve.ttl_hits(ttl).tolist()))
    counts = TokenCounts()
    findings = None
    if isinstance(trace, IdTrace):
        splits = _splits_of_ids(trace, progress)
    else:
        findings = Findings(trace.requests.__getitem__, trace.tokenizer)
        splits = _splits_of_tokens(trace, findings, progress)
    for split in splits:
        _count(counts, split, min((next(hits) * trace.block_size for hits in bounds), default=split.cacheable))
    keeping = []
    if curve is not None and capacity is not None and counts.capacity:
        lru = curve.lru()
        base, top = int(lru[min(capacity, len(lru) - 1)]), int(lru[-1])
        keeping = [(share, int(np.searchsorted(lru, base + share * (top - base)))) for share in SHARES]
    assert sum(getattr(counts, part.name) for part in fields(counts)) == 2 * counts.prompt, counts
    return Explained(counts, findings.result(counts.prompt) if findings else [], keeping)


@dataclass(frozen=True, slots=True)
class _Split:
    """How far one prompt is known, in tokens: each count begins with the prompt, and holds those before it."""

    cacheable: int  # what a cache without bound hits
    known: int
    known_anywhere: int  # in other namespaces too
    num_tokens: int
    repeated: int  # of those that are not known
    needs_last: bool  # of what is known, the last token


def _count(counts: TokenCounts, split: _Split, hit: int) -> None:
    hit = min(hit, split.cacheable)
    known, anywhere = split.known, split.known_anywhere
    if split.needs_last and anywhere == split.num_tokens:
        counts.last_token += 1
        anywhere -= 1
        known = min(known, anywhere)
    counts.prompt += split.num_tokens
    counts.hit += hit
    counts.capacity += split.cacheable - hit
    counts.block_rounding += known - split.cacheable
    counts.namespace += anywhere - known
    counts.broken_prefix += split.repeated
    counts.cold += split.num_tokens - split.known_anywhere - split.repeated


def _splits_of_ids(trace: IdTrace, progress: Progress | None) -> Iterator[_Split]:
    """Which ids came before. The tokens behind the last id are part of no whole block."""
    seen = np.zeros(trace.num_blocks, bool)
    for number, request in enumerate(trace.requests):
        if progress is not None and number % 256 == 0:
            progress(number / len(trace.requests))
        num_known = 0
        for start, end in zip(request.runs[::2], request.runs[1::2], strict=True):
            new = np.flatnonzero(~seen[start:end])
            num_known += int(new[0]) if len(new) else end - start
            if len(new):
                break
        path = request.runs if request.path is None else request.path
        for start, end in zip(path[::2], path[1::2], strict=True):
            seen[start:end] = True
        num_tokens = request.num_prompt_tokens
        cacheable = min(num_known * trace.block_size, num_tokens)
        known = num_tokens if num_known == request.num_blocks else cacheable
        yield _Split(cacheable, known, known, num_tokens, 0, needs_last=False)


def _splits_of_tokens(trace: TokenTrace, findings: Findings, progress: Progress | None) -> Iterator[_Split]:
    """Each request against all before it, in a cache without bound and with blocks of one token."""
    requests, size = trace.requests, trace.block_size
    if isinstance(requests, TokenRequests):
        num_tokens, num_namespaces = requests.num_distinct_tokens, len(requests.namespaces)
    else:
        num_tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in requests)
        num_namespaces = len({request.namespace for request in requests})
    cache = PrefixCache(num_tokens, 1)
    everywhere = PrefixCache(num_tokens, 1) if num_namespaces > 1 else None
    is_end = np.zeros(num_tokens, bool)  # of the blocks, whether a prompt ends there, but for what opens its answer
    repeats = Repeats(findings.tokens)
    for number, request in enumerate(requests):
        if progress is not None and number % 16 == 0:
            progress(number / len(requests))
        known, table = _serve(cache, request, request.namespace)
        anywhere = known if everywhere is None else max(known, _serve(everywhere, request, None)[0])
        blocks = np.frombuffer(table, np.int32)
        tokens = np.frombuffer(request.tokens + request.output_tokens, "<i4")
        found = repeats.find(tokens[: request.num_prompt_tokens], anywhere)
        if found:
            goes_on = bool(is_end[blocks[:known]].any())
            findings.examine(number, hit=known, repeats=found, goes_on=goes_on)
        repeats.add(number, tokens, anywhere)
        if (end := _end_of_prompt(request)) > 0:
            is_end[blocks[end - 1]] = True
        cacheable = min(known, request.num_prompt_tokens - 1) // size * size
        repeated = sum(map(len, found))
        yield _Split(cacheable, known, anywhere, request.num_prompt_tokens, repeated, needs_last=True)


def _serve(cache: PrefixCache, request: TokenRequest, namespace: Hashable) -> "tuple[int, array[int]]":
    """The known tokens of a prompt, and the table of all its tokens and its answer's, cached from now on."""
    running = cache.allocate(request.tokens, namespace=namespace, min_prefill_tokens=0)
    known = running.num_cached_tokens
    cache.commit(running)
    if len(request.output_tokens) > TOKEN_BYTES:
        cache.append(running, request.output_tokens[:-TOKEN_BYTES])
        cache.commit(running)
    table = running.block_table
    cache.free(running)
    return known, table


def _end_of_prompt(request: TokenRequest) -> int:
    """How many tokens of the prompt end with its last message from outside; 0 where none is."""
    parts = parts_of(request.tokens)
    if not parts:
        return request.num_prompt_tokens
    return max((part.end for part in parts if part.role in ("user", "tool")), default=0)
