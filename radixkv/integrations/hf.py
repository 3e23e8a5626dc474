"""Prefix caching for any Transformers decoder: `RadixCache`. Knows what a session fed to the model, not how it attends.

A model wants K and V contiguous, and blocks are scattered: a session copies its hit out of the store, the model appends
to the copy, and the whole blocks of it are copied back at the end. So what is cached is never written to by a model,
and nothing is pinned and no lock is held while one runs.
"""

import inspect
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache

from radixkv.cache import PrefixCache, Request
from radixkv.errors import OutOfBlocksError
from radixkv.explanation import Explanation
from radixkv.integrations.hf_cache import (
    CACHE_ARGUMENT,
    CACHE_ARGUMENTS,
    Layer,
    NoLayer,
    SessionKV,
    attention_layers,
    length_of_fixed_rope,
    no_prefix,
    tell_session,
)
from radixkv.store import KV, KVStore
from radixkv.tokens import TOKEN_BYTES, common_units
from radixkv.tree import Policy, typed_name

_log = logging.getLogger("radixkv")


@dataclass(slots=True)
class SessionStats:
    """What a `RadixCache` has done. Counters only grow; a snapshot does not change any more."""

    sessions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, not computed again
    prefilled_tokens: int = 0  # the others
    committed_tokens: int = 0  # written to the store, in whole blocks
    evicted_blocks: int = 0
    bypasses: dict[str, int] = field(default_factory=dict)  # why a generation did without the cache -> how often

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached, in [0, 1]."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Session:
    """One generation on a `RadixCache`, of one prompt or a batch: a context manager, single-use, for one thread.

    `kwargs` go to `generate` beside the same input_ids, whole, or to `forward` in a loop of one's own. They are empty
    where the cache is bypassed, and `bypass` says why. On a clean exit the whole blocks of what was fed to the model
    are committed; on an exception nothing is, and there is nothing to release.
    """

    def __init__(
        self,
        cache: "RadixCache",
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        namespace: Hashable,
        bypass: str | None = None,
    ) -> None:
        self.kwargs: dict[str, Any] = {}
        self.bypass = bypass  # why the cache is not used, if so
        self.num_prompt_tokens = 0
        self.num_cached_tokens_by_row: list[int] = []
        self._cache = cache
        self._ids = input_ids
        self._mask = attention_mask
        self._namespace = namespace
        self._key: Hashable = None
        self._epoch = 0
        self._kv: SessionKV | None = None
        self._entered = False

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that are not computed, over all rows: found in the cache, or in another row of the batch."""
        return sum(self.num_cached_tokens_by_row)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that are computed, over all rows."""
        return self.num_prompt_tokens - self.num_cached_tokens

    def __enter__(self) -> "Session":
        if self._entered:
            raise RuntimeError("a session can be entered once only")
        self._entered = True
        cache, ids = self._cache, self._ids
        pads: list[int] = []
        if self.bypass is None:
            pads, self.bypass = cache._left_pads(ids, self._mask)
        if self.bypass is not None:
            self.num_prompt_tokens = ids.numel() if self._mask is None else int(self._mask.sum())
            self.num_cached_tokens_by_row = [0] * ids.shape[0]
            cache._count_bypass(self.bypass)
            return self
        packed = ids.to("cpu", torch.int32).numpy()
        rows = [row[pad:].tobytes() for row, pad in zip(packed, pads, strict=True)]
        self.num_prompt_tokens = sum(map(len, rows)) // TOKEN_BYTES
        self._key = (self._namespace, cache._adapters())
        self._epoch = cache._epoch
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # else what is made here could only be written to in that mode
            self._fill(rows, pads)
        cache._count_session(self.num_prompt_tokens, self.num_cached_tokens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kv, self._kv = self._kv, None
        self.kwargs = {}  # which held on to all K and V
        if kv is None:
            return
        kv.is_open = False
        if kind is None:
            self._commit(kv)

    def _fill(self, rows: list[bytes], pads: list[int]) -> None:
        """Make the K and V that `generate` starts from: hits copied, and rows that lag behind prefilled, one by one.

        generate knows one number of columns for the whole batch: all rows are brought to the one that costs least.
        """
        cache, num_columns = self._cache, self._ids.shape[1]
        order = sorted(range(len(rows)), key=rows.__getitem__)  # rows that share a prefix become neighbours
        shared = {row: (before, _num_common(rows[before], rows[row])) for before, row in pairwise(order)}
        kv = cache._new_kv(self._ids, pads)
        holds: dict[int, Request] = {}
        try:
            for row, tokens in enumerate(rows):
                cache._hold(holds, row, tokens, self._key)
            hits = [holds[row].num_tokens if row in holds else 0 for row in range(len(rows))]
            start = _start_column(num_columns, pads, hits, shared, cache._forward_cost)
            targets = [max(0, start - pad) for pad in pads]  # tokens of each row before that column
            if start:
                for layer, like in zip(kv.attention, cache._like, strict=True):
                    layer.reserve(len(rows), like)
            for row, request in holds.items():
                if num := min(hits[row], targets[row]):
                    cache._read(request, kv, row, pads[row], num)
        finally:
            cache._release(holds.values())
        for row in order:
            num = min(hits[row], targets[row])
            before, common = shared.get(row, (row, 0))
            common = min(common, targets[row], targets[before])
            if common > num:
                for layer in kv.attention:
                    layer.put(row, pads[row] + num, layer.tokens(before, pads[before] + num, pads[before] + common))
                num = common
            if num < targets[row]:
                cache._prefill(kv, row, pads[row], num, targets[row])
            self.num_cached_tokens_by_row.append(num)
        by_row = dict(zip(order, self.num_cached_tokens_by_row, strict=True))
        self.num_cached_tokens_by_row = [by_row[row] for row in range(len(rows))]
        if start:
            for layer in kv.attention:
                layer.set_length(start)
        kv.num_fed = start
        self._kv = kv
        self.kwargs = {CACHE_ARGUMENT: kv}

    def _commit(self, kv: SessionKV) -> None:
        cache = self._cache
        if not kv.is_consistent(cache._like):
            cache._count_bypass("not committed: fed with embeddings, a mask, positions or a dtype of its own")
            return
        if self._key != (self._namespace, cache._adapters()):
            cache._count_bypass("not committed: the adapters changed meanwhile")
            return
        pads = kv.pads.tolist()
        end = min(kv.num_fed, min(pads) + cache._max_tokens)
        ids = kv.ids[:, :end].to("cpu", torch.int32).numpy()
        idle = cache._idle_tokens()
        for row, pad in enumerate(pads):
            last = end
            # a finished row of a batch is fed padding
            while last > kv.num_prompt and ids[row, last - 1] in idle and ids[row, last - 1] == ids[row, last - 2]:
                last -= 1
            cache._publish(ids[row, pad:last].tobytes(), self._key, self._epoch, kv, row, pad)


class RadixCache:
    """A prefix cache of real K and V for one Transformers decoder, used through any of three doors.

    `attach` serves every `model.generate` from then on, `session` one call of it, `generate` calls it for you. What
    cannot be served (see `docs/hf.md`) bypasses the cache: counted in `stats`, logged once, never an error.

    Thread-safe: one lock guards the bookkeeping, and is never held while the model runs or K and V are copied.
    """

    def __init__(
        self,
        model: Any,
        max_bytes: int | str = "1GiB",
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        policy: str | Policy = "lru",
        quantize: str | None = None,
    ) -> None:
        """A cache of `max_bytes` ("1GiB", or "40%" of what is free; `num_blocks` goes before it), all taken now.

        Runs the model twice on eight tokens to see its K and V. `model` may be a PEFT model; `quantize` is `KVStore`'s.

        Raises: ValueError where not one block fits, and for a layer that cannot be served, naming it.
        """
        self.model = model
        model = getattr(model, "_orig_mod", model)  # of torch.compile, whose generate is the original's
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._lock = threading.Lock()
        self._stats = SessionStats()
        self._epoch = 0
        self._original: Any = None
        self._patch: Any = None
        self._takes = frozenset(inspect.signature(self._model.forward).parameters)
        self._is_decoder = not getattr(self._model.config, "is_encoder_decoder", False)
        self._keeps: list[bool] = []
        self._like: list[KV] = []  # of no tokens: the shape, dtype and device of each layer's K and V
        self._max_tokens = length_of_fixed_rope(self._model)
        if not self._is_decoder:
            self._prefixes, self.store = PrefixCache(1, block_size), KVStore(1, block_size)
            return
        self._keeps = attention_layers(self._model)
        layers = self._probe()
        self._like = [(k[:0], v[:0]) for k, v in layers]
        if num_blocks is None:
            self.store = KVStore.fitting(max_bytes, block_size, layers, quantize=quantize)
        else:
            self.store = KVStore(num_blocks, block_size, quantize=quantize)
            for layer, (k, v) in enumerate(self._like):  # threads must not be first
                self.store.write(layer, k, v, torch.empty(0, dtype=torch.int64))
        self._prefixes = PrefixCache(self.store.num_blocks, block_size, policy=policy)
        self._home = self._dtype_and_device()
        # what a forward pass costs beyond its tokens, in tokens: reading the weights (a guess where it is no CPU)
        self._forward_cost = 16 if self._model.device.type == "cpu" else 512
        if tell_session not in self._model._forward_pre_hooks.values():
            self._model.register_forward_pre_hook(tell_session, with_kwargs=True)

    # Doors

    def attach(self, *, namespace: Hashable = None) -> None:
        """Serve every `generate` of the model from now on, from pipelines too. A second time is an error."""
        if self._patch is not None or hasattr(vars(self._model).get("generate"), "radixkv_cache"):
            raise RuntimeError("a RadixCache is attached to this model already; detach it first")
        typed_name(namespace)
        original = self._model.generate
        parameters = [name for name in inspect.signature(original).parameters if name != "kwargs"]

        @wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if self._patch is not generate or len(args) > len(parameters) or set(parameters[: len(args)]) & set(kwargs):
                return original(*args, **kwargs)
            return self._run(original, dict(zip(parameters, args, strict=False)) | kwargs, namespace)

        generate.radixkv_cache = self  # type: ignore[attr-defined]
        self._original = vars(self._model).get("generate")
        self._model.generate = self._patch = generate

    def detach(self) -> None:
        """Give the model its own `generate` back; without effect where nothing is attached. What is cached stays."""
        if self._patch is None:
            return
        if vars(self._model).get("generate") is self._patch:  # else somebody wrapped it since: it passes through
            if self._original is None:
                del self._model.generate
            else:
                self._model.generate = self._original
        self._patch = self._original = None

    def session(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        namespace: Hashable = None,
        generate_kwargs: Mapping[str, Any] | None = None,
    ) -> Session:
        """A session on `input_ids` `(batch, num_tokens)`, left-padded where `attention_mask` says so.

        Entering it copies the hit out of the store and, in a batch whose rows hit differently, prefills what lags.
        Nothing is shared between namespaces. `generate_kwargs` are the settings that `generate` will be given: where
        they cannot be served, the session bypasses the cache.

        Raises: TypeError or ValueError for what is not a batch of token ids.
        """
        if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
            raise TypeError(f"input_ids must be a tensor of integers, got {_shown(input_ids)}")
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must be (batch, num_tokens), got shape {tuple(input_ids.shape)}")
        typed_name(namespace)
        settings = dict(generate_kwargs or {})
        reason = None if generate_kwargs is None else self._why_not(settings)
        if reason is None and self._is_decoder:
            reason = self._infers_mask(input_ids, attention_mask, settings)
        return Session(self, input_ids, attention_mask, namespace, reason)

    def generate(self, model_inputs: Any, *, namespace: Hashable = None, **kwargs: Any) -> Any:
        """`model.generate` on the cache, with its `kwargs`. `model_inputs` is what a tokenizer returns, or input_ids
        `(batch, num_tokens)`."""
        inputs = dict(model_inputs) if isinstance(model_inputs, Mapping) else {"input_ids": model_inputs}
        typed_name(namespace)
        original = self.model.generate
        if self._patch is not None and self.model is self._model:
            original = self._patch.__wrapped__
        return self._run(original, inputs | kwargs, namespace)

    # Questions

    @property
    def stats(self) -> SessionStats:
        """A snapshot of the counters."""
        with self._lock:
            evicted = self._prefixes.stats.evicted_blocks
            return replace(self._stats, evicted_blocks=evicted, bypasses=dict(self._stats.bypasses))

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._prefixes.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._prefixes.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be matched."""
        with self._lock:
            return self._prefixes.num_cached_blocks

    def explain(self, input_ids: Any, *, namespace: Hashable = None) -> Explanation:
        """Why the hit of one prompt ends where it does. Changes nothing."""
        if getattr(input_ids, "ndim", 1) == 2:
            if len(input_ids) != 1:
                raise ValueError(f"explain takes one prompt, got {len(input_ids)}")
            input_ids = input_ids[0]
        key = (namespace, self._adapters())
        with self._lock:
            found = self._prefixes.explain(input_ids, namespace=key)
        if isinstance(found.namespace, tuple):  # ours: without adapters it is the caller's
            name, adapters = found.namespace
            return replace(found, namespace=found.namespace if adapters else name)
        return found

    def check(self) -> None:
        """Prove the bookkeeping's invariants. Raises: AssertionError."""
        with self._lock:
            self._prefixes.check()

    def reset(self) -> None:
        """Forget everything: the weights changed, or an adapter's did. What runs now is not committed."""
        with self._lock:
            self._epoch += 1
            self._prefixes.reset()

    def __repr__(self) -> str:
        return f"RadixCache({type(self._model).__name__}, {self._prefixes!r}, attached={self._patch is not None})"

    # What sessions do under the lock

    def _hold(self, holds: dict[int, Request], row: int, tokens: bytes, key: Hashable) -> None:
        """Pin the longest hit that leaves a token to prefill."""
        with self._lock:
            hit = self._prefixes.match(tokens[:-TOKEN_BYTES], namespace=key)
            if hit:
                holds[row] = self._begin(tokens[: hit * TOKEN_BYTES], key)

    def _release(self, requests: Iterable[Request]) -> None:
        with self._lock:
            for request in requests:
                self._prefixes.free(request)

    def _publish(self, tokens: bytes, key: Hashable, epoch: int, kv: SessionKV, row: int, pad: int) -> None:
        """Write and commit the whole blocks of one row, as many as find room."""
        width = self.block_size * TOKEN_BYTES
        tokens = tokens[: min(len(tokens) // width, self.num_blocks) * width]
        with self._lock:
            request = self._allocate(tokens, key) if tokens and epoch == self._epoch else None
        if request is None:
            return
        try:
            start, end = request.num_cached_tokens, request.num_tokens
            if start == end:
                return
            slots = self.store.slot_mapping(request.block_table, start, end).to(self._like[0][0].device)
            for number, layer in enumerate(kv.attention):
                self.store.write(number, *layer.tokens(row, pad + start, pad + end), slots)
            self._settle()
            with self._lock:
                self._prefixes.commit(request)
                self._stats.committed_tokens += end - start
        finally:
            self._release([request])

    def _allocate(self, tokens: bytes, key: Hashable) -> Request | None:
        """A request for `tokens`, or for as many of their blocks as there is room for while others are pinned."""
        width = self.block_size * TOKEN_BYTES
        try:
            return self._begin(tokens, key)
        except OutOfBlocksError as error:
            tokens = tokens[: len(tokens) - (error.needed - error.free - error.evictable) * width]
        return self._begin(tokens, key) if tokens else None

    def _begin(self, tokens: bytes, key: Hashable) -> Request:
        # a session begins one request to read and one to write, so it counts its own hits, and these are kept apart
        return self._prefixes.allocate(tokens, namespace=key, min_prefill_tokens=0, resumed=True)

    def _count_session(self, num_prompt: int, num_cached: int) -> None:
        with self._lock:
            self._stats.sessions += 1
            self._stats.prompt_tokens += num_prompt
            self._stats.cached_tokens += num_cached
            self._stats.prefilled_tokens += num_prompt - num_cached

    def _count_bypass(self, reason: str) -> None:
        with self._lock:
            num = self._stats.bypasses[reason] = self._stats.bypasses.get(reason, 0) + 1
        if num == 1:
            _log.warning("prefix cache bypassed: %s", reason)

    # The model

    def _run(self, original: Callable[..., Any], kwargs: dict[str, Any], namespace: Hashable) -> Any:
        """`generate` in a session of its own."""
        if any(isinstance(kwargs.get(name), SessionKV) for name in CACHE_ARGUMENTS):
            return original(**kwargs)  # within a session
        reason = self._why_not(kwargs)
        ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
            self._count_bypass(reason or "no input_ids")
            return original(**kwargs)
        mask = kwargs.get("attention_mask")
        reason = reason or self._infers_mask(ids, mask, kwargs)
        with Session(self, ids, mask, namespace, reason) as session:
            return original(**kwargs, **session.kwargs)

    def _why_not(self, kwargs: dict[str, Any]) -> str | None:
        """Why `generate(**kwargs)` cannot be served, if so."""
        if not self._is_decoder:
            return "an encoder-decoder model"
        if any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS):
            return "a cache passed by the caller"
        for name, reason in _BYPASSES.items():
            for value in self._settings(name, kwargs):
                if value is not None and value is not False and not (name in _COUNTS and value <= _COUNTS[name]):
                    return reason
        if any(value is False for value in self._settings("use_cache", kwargs)):
            return "use_cache=False"
        for name, value in kwargs.items():
            if value is not None and name not in _TEXT_INPUTS and not hasattr(_CONFIG, name) and name not in _GENERATE:
                return f"model input {name!r}"
        return None

    def _settings(self, name: str, kwargs: dict[str, Any]) -> Iterator[Any]:
        """What a generation setting might be: generate's precedence among these differs by version."""
        if name in kwargs:
            yield kwargs[name]
            return
        for source in (kwargs.get("generation_config"), self._model.generation_config):
            yield getattr(source, name, None)

    def _infers_mask(self, ids: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> str | None:
        """Where no mask is given, generate takes pad tokens for padding, in some cases: we take no part in guessing."""
        pad, eos = (
            next((value for value in self._settings(name, kwargs) if value is not None), None)
            for name in ("pad_token_id", "eos_token_id")
        )
        if mask is not None or pad is None or pad in (eos if isinstance(eos, list) else [eos]):
            return None
        return "padding without an attention mask" if bool((ids == pad).any()) else None

    def _idle_tokens(self) -> set[int]:
        """The tokens that `generate` feeds to rows that have ended."""
        tokens: set[int] = set()
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(self._model.generation_config, name, None)
            tokens.update(value if isinstance(value, list) else [value] if value is not None else [])
        return tokens

    def _left_pads(self, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[list[int], str | None]:
        """How many columns of padding each row begins with; and why the batch cannot be served, if so."""
        num_rows, num_columns = ids.shape
        if not self._is_decoder:
            return [], "an encoder-decoder model"
        if self._model.training:
            return [], "a model in training mode"
        if any(value is False for value in self._settings("use_cache", {})):
            return [], "use_cache=False"
        if self._dtype_and_device() != self._home:
            return [], "dtype, device or autocast are not those of the cache"
        if self._learns_prompt():
            return [], "an adapter that prepends a prompt of its own"
        if not num_rows or not num_columns or bool((ids < 0).any()):
            return [], "token ids that are not a prompt's"
        pads = [0] * num_rows
        if mask is not None:
            if mask.shape != ids.shape:
                return [], "an attention mask of another shape than input_ids"
            kept = mask.bool()
            lengths = kept.sum(1)
            columns = torch.arange(num_columns, device=mask.device)
            if not torch.equal(kept, columns >= num_columns - lengths[:, None]) or not bool(lengths.all()):
                return [], "an attention mask that is not left padding"
            pads = (num_columns - lengths).tolist()
        if any(pads) and "position_ids" not in self._takes:
            return [], "padding for a model without position_ids"
        if num_columns - min(pads) > self._max_tokens:
            return [], f"prompts of more than {self._max_tokens} tokens, on which the rotary frequencies depend"
        return pads, None

    def _new_kv(self, ids: torch.Tensor, pads: list[int]) -> SessionKV:
        ids = ids.to(self._model.device)
        capacity = ids.shape[1] + 64
        layers = [Layer(capacity, num_padded=max(pads)) if keeps else NoLayer() for keeps in self._keeps]
        return SessionKV(self._model, layers, ids, pads)

    def _read(self, request: Request, kv: SessionKV, row: int, start: int, num_tokens: int) -> None:
        blocks = torch.frombuffer(request.block_table, dtype=torch.int32).to(self._like[0][0].device, torch.int64)
        for number, layer in enumerate(kv.attention):
            layer.put(row, start, self.store.read(number, blocks, num_tokens))
        self._settle()  # before others may evict and write

    def _settle(self) -> None:
        """Wait until K and V are copied, for another thread may go on in another stream."""
        for device in {k.device for k, _ in self._like}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _prefill(self, kv: SessionKV, row: int, pad: int, start: int, end: int) -> None:
        """Run the model on tokens [start, end) of one row."""
        layers = [layer.row(row, pad, start) if isinstance(layer, Layer) else layer for layer in kv.layers]
        self._forward(kv.ids[row : row + 1, pad + start : pad + end], Cache(layers=layers), start)

    def _forward(self, ids: torch.Tensor, cache: Cache, start: int) -> None:
        name = next((name for name in CACHE_ARGUMENTS if name in self._takes), CACHE_ARGUMENT)
        options: dict[str, Any] = {name: cache, "use_cache": True}
        if "position_ids" in self._takes:
            options["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 1
        self._model(input_ids=ids, **options)

    def _probe(self) -> list[KV]:
        """K and V of one token in each layer that keeps them, `(1, num_kv_heads, head_dim)`.

        Raises: ValueError for a layer that stores none, and where what follows a token changes them.
        """
        vocabulary = self._model.get_input_embeddings().num_embeddings
        found: list[list[KV]] = []
        for following in (vocabulary // 3, vocabulary // 5):
            ids = torch.tensor([[vocabulary // 2] + 7 * [following]], device=self._model.device)
            layers = [Layer() if keeps else NoLayer() for keeps in self._keeps]
            with torch.no_grad():
                self._forward(ids, Cache(layers=layers), 0)
            for number, layer in enumerate(layers):
                if isinstance(layer, Layer) and layer.length != ids.shape[1]:
                    raise no_prefix(self._model, number, "without K and V")
            found.append([layer.tokens(0, 0, 1) for layer in layers if isinstance(layer, Layer)])
        # the first layer's depend on the token alone; same shapes, so that what differs in the next is no rounding
        for (first, _), (second, _) in zip(found[0][1:2], found[1][1:2], strict=True):
            if (first - second).float().norm() > 0.02 * first.float().norm():
                raise no_prefix(self._model, 0, "not causal")
        return found[0]

    def _dtype_and_device(self) -> tuple[Any, ...]:
        device = self._model.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return self._model.dtype, device, autocast

    def _adapters(self) -> Hashable:
        """Which adapters act on the model now, how strongly: what is cached under one state is no other's."""
        if not hasattr(self._model, "peft_config"):
            return ()
        states = []
        for name, module in self._model.named_modules():
            if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
                active = [] if module.disable_adapters else module.active_adapters
                scaling = getattr(module, "scaling", {})
                strengths = tuple((adapter, scaling.get(adapter)) for adapter in active)
                if active or module.merged_adapters:
                    states.append((name, strengths, tuple(module.merged_adapters)))
        return tuple(states)

    def _learns_prompt(self) -> bool:
        """Whether PEFT puts virtual tokens before the prompt."""
        prepare = vars(self._model).get("prepare_inputs_for_generation")
        own = type(self._model).prepare_inputs_for_generation
        patched = prepare is not None and getattr(prepare, "__func__", None) is not own
        configs = getattr(self.model, "peft_config", None) or {}
        return patched or any(getattr(config, "is_prompt_learning", False) for config in configs.values())


# what changes how generate uses a cache, or asks for what only a whole prefill has
_BYPASSES = {
    "inputs_embeds": "inputs_embeds",
    "assistant_model": "assisted decoding",
    "assistant_early_exit": "assisted decoding",
    "use_mtp": "assisted decoding",
    "is_assistant": "assisted decoding",
    "prompt_lookup_num_tokens": "prompt-lookup decoding",
    "dola_layers": "DoLa decoding",
    "penalty_alpha": "contrastive search",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "num_beam_groups": "group beam search",
    "custom_generate": "a generate of the caller's own",
    "cache_implementation": "a cache_implementation",
    "token_healing": "token healing",
    "prefill_chunk_size": "chunked prefill",
    "synced_gpus": "synced GPUs",
    "output_attentions": "attentions or hidden states asked for",
    "output_hidden_states": "attentions or hidden states asked for",
}
_COUNTS = {"num_beam_groups": 1, "penalty_alpha": 0}  # at most this is none
_TEXT_INPUTS = {"input_ids", "attention_mask", "tokenizer", "trust_remote_code"}
_CONFIG = GenerationConfig()  # type: ignore[no-untyped-call]
_GENERATE = frozenset(inspect.signature(GenerationMixin.generate).parameters) - {"kwargs"}


def _start_column(
    num_columns: int, pads: list[int], hits: list[int], shared: dict[int, tuple[int, int]], forward_cost: int
) -> int:
    """The column from which to prefill a batch as one, so that the fewest tokens are computed in all.

    `hits` are tokens known of each row, `shared[row]` is a row filled before it and how many tokens the two have in
    common. What a row lacks before the column is prefilled apart, at `forward_cost` tokens beside its own.
    """

    def price(start: int) -> int:
        targets = [max(0, start - pad) for pad in pads]
        total = len(pads) * (num_columns - start)
        for row, target in enumerate(targets):
            before, common = shared.get(row, (row, 0))
            known = max(min(hits[row], target), min(common, target, targets[before]))
            if known < target:
                total += target - known + forward_cost
        return total

    starts = {0, *map(sum, zip(pads, hits, strict=True)), *(pads[row] + common for row, (_, common) in shared.items())}
    return min(sorted(min(start, num_columns - 1) for start in starts), key=price)


def _num_common(first: bytes, second: bytes) -> int:
    """How many tokens two packed prompts begin with in common."""
    return common_units(first, 0, bytearray(second), TOKEN_BYTES)


def _shown(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
