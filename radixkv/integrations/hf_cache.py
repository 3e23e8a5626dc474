"""What transformers 4.57 to 5.24 call a cache: here one that keeps all K and V, and knows which tokens they are of.

What differs between versions is resolved here and nowhere else. Knows nothing of blocks.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from radixkv.store import KV

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # all that models ever called theirs
_PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = next(name for name in CACHE_ARGUMENTS if name in _PREPARE)  # what generate calls it: "cache" from 5.24

NoLayer: Any = getattr(cache_utils, "DummyLayer", None)  # stands where a layer stores nothing; 4.57 leaves those out
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_STORES_NOTHING = {"dummy", "moe", "mlp"}
# where the mask alone does not say what is attended to; found by serving a random model of each causal family
_UNSERVED = {"git": "reads a cache as image tokens", "moshi": "windowed by what its cache drops, not by its mask"}


def attention_layers(model: Any) -> list[bool]:
    """For each layer of the model's cache, whether it keeps K and V of its own (it may use another's, or none).

    Raises: ValueError naming the first layer that keeps anything else, which a prefix cannot be cut from.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _UNSERVED:
        raise no_prefix(model, 0, _UNSERVED[config.model_type])
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    for layer, kind in enumerate(kinds):
        if kind not in _ATTENTION | _STORES_NOTHING:
            raise no_prefix(model, layer, kind)
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        raise no_prefix(model, 0, "recurrent")
    layers = DynamicCache(config=config).layers
    for layer, found in enumerate(layers):
        if type(found) not in (DynamicLayer, DynamicSlidingWindowLayer, NoLayer):
            raise no_prefix(model, layer, type(found).__name__)
    return [isinstance(found, DynamicLayer) for found in layers]


def length_of_fixed_rope(model: Any) -> int:
    """Up to how many tokens a key does not depend on the length of its sequence: "dynamic" and "longrope" frequencies
    do, beyond the length the model was first trained on."""
    lengths = [2**31]
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if not any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            continue
        config = module.config
        scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        sources = [scaling, *(part for part in scaling.values() if isinstance(part, dict))]
        name = "original_max_position_embeddings"
        found = [source.get(name) for source in sources]
        found += [getattr(config, name, None), getattr(config, "max_position_embeddings", None)]
        lengths += [int(length) - 1 for length in found if length]
    return min(lengths)


def no_prefix(model: Any, layer: int, kind: str) -> ValueError:
    """The error for a layer that cannot be served."""
    return ValueError(
        f"layer {layer} of {type(model).__name__} is {kind!r}: a prefix can be served only by layers that keep K and V "
        "of each token, and see no token after it"
    )


class Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Contiguous K and V of one layer, `(batch, num_kv_heads, num_tokens, head_dim)`, in buffers with room to grow.

    Keeps all tokens, whatever the layer's window, and says so: the mask hides what is outside. K and V may differ in
    head_dim. Not thread-safe.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, capacity: int = 0, *, num_padded: int = 0) -> None:
        self.keys: Any = None  # tensors once there are any: what models may read
        self.values: Any = None
        self.is_initialized = False
        self.length = 0
        self._capacity = capacity  # columns to begin with
        self._num_padded = num_padded  # columns in which some row has none of its tokens
        self._buffers: KV | None = None

    def reserve(self, batch: int, like: KV) -> None:
        """Take buffers for `batch` rows of K and V `like` these, `(num_tokens, num_kv_heads, head_dim)`."""
        k, v = (x.new_empty((batch, x.shape[1], self._capacity, x.shape[2])) for x in like)
        for x in (k, v):
            x[:, :, : self._num_padded] = 0  # subtle: masked, but 0 x nan is nan
        self._buffers = (k, v)

    def tokens(self, row: int, start: int, end: int) -> KV:
        """K and V in columns [start, end) of a row, `(num_tokens, num_kv_heads, head_dim)`: views."""
        assert self._buffers is not None
        k, v = (x[row, :, start:end].transpose(0, 1) for x in self._buffers)
        return k, v

    def put(self, row: int, start: int, kv: KV) -> None:
        """Write K and V, `(num_tokens, num_kv_heads, head_dim)`, to the columns of a row from `start` on."""
        for target, x in zip(self.tokens(row, start, start + len(kv[0])), kv, strict=True):
            target.copy_(x)

    def row(self, row: int, start: int, length: int) -> "Layer":
        """One row from column `start` on, `length` tokens of it written, as a layer that writes through."""
        assert self._buffers is not None
        k, v = (x[row : row + 1, :, start:] for x in self._buffers)
        layer = Layer()
        layer._buffers = (k, v)
        layer.set_length(length)
        return layer

    def set_length(self, length: int) -> None:
        """The first `length` columns are there, and no others."""
        assert self._buffers is not None
        self.length = length
        self.keys, self.values = (x[:, :, :length] for x in self._buffers)
        self.is_initialized = True

    # What transformers calls

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Append; returns K and V of all tokens. Rows that `generate` multiplied are multiplied here too."""
        if self._buffers is None:
            self._capacity = max(self._capacity, key_states.shape[2])
            self.reserve(len(key_states), (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)))
        assert self._buffers is not None
        if len(key_states) != len(self._buffers[0]):
            self.batch_repeat_interleave(len(key_states) // len(self._buffers[0]))
        end = self.length + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            room = end - self.length + max(64, end // 4)  # so that growing costs a constant a token
            self._change(
                lambda x: torch.cat([x[:, :, : self.length], x.new_empty((*x.shape[:2], room, x.shape[3]))], 2)
            )
        for buffer, x in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = x
        self.set_length(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """How many K and V the next query meets, and the first of them; `query` is its length, or in 4.57 positions."""
        return self.length + (len(query) if isinstance(query, torch.Tensor) else query), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # 4.57

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing: the first K and V do it."""

    def reset(self) -> None:
        self._buffers, self.keys, self.values, self.length, self.is_initialized = None, None, None, 0, False

    def crop(self, num_tokens: int) -> None:
        """Drop -num_tokens; or keep num_tokens, as it was before 5.24."""
        keep = self.length + num_tokens if num_tokens <= 0 else num_tokens
        if self._buffers is not None and keep < self.length:
            self.set_length(keep)

    def reorder_cache(self, beam_idx: Any) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda x: x[indices.to(x.device)])

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._buffers is not None:
            self._buffers = (change(self._buffers[0]), change(self._buffers[1]))
            self.set_length(self.length)


class SessionKV(Cache):
    """All K and V of a session, and the tokens they are of: a hook on the model says what is fed, so none are guessed.

    Columns are those of `generate`: a row's tokens begin behind its padding.
    """

    def __init__(self, model: torch.nn.Module, layers: list[Any], prompt: torch.Tensor, pads: list[int]) -> None:
        super().__init__(layers=layers)
        self.model = model
        self.attention: list[Layer] = [layer for layer in layers if isinstance(layer, Layer)]
        self.ids = prompt.to(torch.int64, copy=True)  # (batch, at least num_fed and the prompt)
        self.pads = torch.tensor(pads, device=prompt.device)  # (batch,) columns of padding
        self.is_padded = any(pads)
        self.num_prompt = prompt.shape[1]
        self.num_fed = 0  # columns whose K and V are there
        self.is_open = True
        self._as_expected = torch.ones((), dtype=torch.bool, device=prompt.device)  # a tensor: asking it would wait

    def feed(self, ids: torch.Tensor | None, positions: torch.Tensor | None, mask: Any) -> None:
        """The model is about to run on `ids`, `(batch, num_tokens)`, at these positions under this mask.

        Raises: ValueError where the K and V that are there would be of other tokens, or misplaced.
        """
        if ids is None:  # embeddings: of which tokens, nobody knows
            self._as_expected = torch.zeros_like(self._as_expected)
            return
        device = self.ids.device
        ids = ids.to(device, torch.int64)
        if len(ids) != len(self.ids):
            self._select(torch.arange(len(self.ids)).repeat_interleave(len(ids) // len(self.ids)))
        start, end = self.num_fed, self.num_fed + ids.shape[1]
        columns = torch.arange(end, device=device)
        in_place = torch.ones((), dtype=torch.bool, device=device)
        if positions is not None:
            expected = columns[start:] - self.pads[:, None]  # (batch, num_tokens)
            in_place &= ((positions.to(device) == expected) | (expected < 0)).all()
        elif self.is_padded:  # the model would count the padding
            in_place = torch.zeros_like(in_place)
        if isinstance(mask, torch.Tensor) and mask.shape == (len(ids), end):
            in_place &= (mask.to(device).bool() == (columns >= self.pads[:, None])).all()
        elif mask is not None or (start < self.num_prompt and self.is_padded):
            in_place = torch.zeros_like(in_place)
        if start and (start < self.num_prompt or ids.shape[1] > 1):  # once a generation: the answer is waited for
            known = max(0, min(end, self.num_prompt) - start)
            if not torch.equal(self.ids[:, start : start + known], ids[:, :known]) or not bool(in_place):
                raise ValueError(
                    f"the tokens, positions or padding in columns [{start}, {end}) are not those of the session: "
                    "pass the same input_ids, whole, and attention_mask to it and to generate, once"
                )
        if end > self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, end - self.ids.shape[1] + max(64, end // 4)))
        self.ids[:, start:end] = ids
        self.num_fed = end
        self._as_expected &= in_place

    def is_consistent(self, like: list[KV]) -> bool:
        """Whether K and V are what the model makes of `ids` by itself, in the dtype of `like`. Waits for the device."""
        return bool(self._as_expected) and all(
            layer.length == self.num_fed
            and (layer.keys is None or (layer.keys.dtype, layer.values.dtype) == (k.dtype, v.dtype))
            for layer, (k, v) in zip(self.attention, like, strict=True)
        )

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._select(torch.arange(len(self.ids)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices)

    def crop(self, num_tokens: int) -> None:
        super().crop(num_tokens)
        self.num_fed = self.attention[0].length

    def _select(self, rows: torch.Tensor) -> None:
        rows = rows.to(self.ids.device)
        self.ids, self.pads = self.ids[rows], self.pads[rows]


def tell_session(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: sessions learn what is fed."""
    for name in CACHE_ARGUMENTS:
        kv = kwargs.get(name)
        if isinstance(kv, SessionKV) and kv.is_open and kv.model is model:
            ids = args[0] if args else kwargs.get("input_ids")
            kv.feed(ids, kwargs.get("position_ids"), kwargs.get("attention_mask"))
