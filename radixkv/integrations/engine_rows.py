"""What the model attends to while the engine computes: K and V of several requests, contiguous. Knows no scheduling.

The store scatters a request over blocks, and to gather them anew for every token costs more than to attend to them. So
they are copied out once. The store has everything as well, so rows can be dropped whenever that is simplest.

`PackedRows` computes the tokens of all requests as one sequence, with an attention of its own that reads a shared
prefix once for all who share it. `PaddedRows` pads, as `generate` does, for models whose attention cannot be replaced.
docs/serving.md has the reasons and the figures.
"""

from array import array
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from radixkv.cache import Request
from radixkv.integrations.hf_cache import CACHE_ARGUMENT, Layer
from radixkv.store import KV, KVStore

ATTENTION = "radixkv"  # what transformers calls `attention`
MIN_SEGMENT = 128  # tokens: about as many as are attended to in the time that a segment costs beside its tokens
MAX_TAIL = 256  # tokens: longer tails are copied out of the store again, as segments
_ROOM = 64  # columns

R = TypeVar("R", bound=Hashable)


class PaddedRows(Generic[R]):
    """K and V of the requests in `order`, one a row, ragged on the left.

    Not thread-safe; to be used under `torch.inference_mode`.
    """

    def __init__(self, num_layers: int, layers: Sequence[int], store: KVStore, device: torch.device) -> None:
        """No rows yet. `layers` are those of the model's `num_layers` that keep K and V, in the store's order."""
        self.order: list[R] = []
        self._kv = Cache(layers=[Layer() for _ in range(num_layers)])
        self._layers = layers
        self._store = store
        self._device = device
        self._lengths: list[int] = []
        self._slots = torch.empty(0)

    def clear(self) -> None:
        self.order = []
        self._kv = Cache(layers=[Layer() for _ in self._kv.layers])

    def inputs(self, held: Mapping[R, tuple[Request, int]], tokens: Mapping[R, "array[int]"]) -> dict[str, Any]:
        """What to call the model with, to compute `tokens` of each request, equally many, behind what is computed.

        `held` has what each holds of the cache, and of how many of its tokens the KV is in the store. Costs O(rows)
        where nobody comes or goes; else all that is kept moves, and who is new is read.
        """
        if self.order != [*held]:
            self._arrange(held)
        ids = torch.tensor([tokens[request].tolist() for request in self.order])  # (rows, width)
        lengths = torch.tensor(self._lengths)[:, None]
        columns = torch.arange(max(self._lengths) + ids.shape[1])
        self._slots = _slots(self._store, self.order, held, tokens).to(self._device)
        return {
            "input_ids": ids.to(self._device),
            "position_ids": (lengths + torch.arange(ids.shape[1])).to(self._device),
            "attention_mask": (columns >= max(self._lengths) - lengths).long().to(self._device),
            "logits_to_keep": 1,
            CACHE_ARGUMENT: self._kv,
        }

    def last(self, logits: torch.Tensor) -> torch.Tensor:
        """Of what the model returned, the logits behind each request's last token, (rows, vocabulary) in `order`."""
        return logits[:, -1]

    def write(self) -> None:
        """The model was called: bring what it computed to the store."""
        width = len(self._slots) // len(self.order)
        for i, index in enumerate(self._layers):
            layer: Any = self._kv.layers[index]
            k, v = (x[:, :, -width:].transpose(1, 2).flatten(0, 1) for x in (layer.keys, layer.values))
            self._store.write(i, k, v, self._slots)
        self._lengths = [length + width for length in self._lengths]

    def _arrange(self, held: Mapping[R, tuple[Request, int]]) -> None:
        old = {request: row for row, request in enumerate(self.order)}
        kept = {row: old[request] for row, request in enumerate(held) if request in old}
        self.order = [*held]
        self._lengths = [num_tokens for _, num_tokens in held.values()]
        for i, index in enumerate(self._layers):
            before: Any = self._kv.layers[index]
            read = {
                row: self._store.read(i, hold.block_table, num_tokens)
                for row, (hold, num_tokens) in enumerate(held.values())
                if row not in kept and num_tokens
            }
            end = max(self._lengths)
            self._kv.layers[index] = after = Layer(end + _ROOM, num_padded=end)
            if not end:
                continue
            after.reserve(len(held), next(iter(read.values())) if read else before.tokens(0, 0, 0))
            after.set_length(end)
            for row, kv in read.items():
                after.put(row, end - len(kv[0]), kv)
            if kept:
                num = min(end, before.length)
                for x, target in ((before.keys, after.keys), (before.values, after.values)):
                    target[[*kept], :, end - num :] = x[[*kept.values()], :, before.length - num :]


class Segment:
    """K and V of a run of positions, contiguous. Tokens [first, last) of a pass attend to all of them.

    `blocks` are those of its whole blocks that the tree owns: by their ids others see that they have the same.
    """

    def __init__(self, blocks: "array[int]", kv: list[KV], num_tokens: int) -> None:
        self.blocks = blocks
        self.kv = kv  # a layer: K as its product wants it, (kv_heads, dim, tokens), and V (kv_heads, tokens, dim)
        self.num_tokens = num_tokens
        self.first = self.last = 0

    def cut(self, num_blocks: int, num_tokens: int) -> "Segment":
        """Cut off the first `num_blocks`, which are `num_tokens`, and return them. Views: no bytes move."""
        upper = [(k[..., :num_tokens], v[:, :num_tokens]) for k, v in self.kv]
        self.kv = [(k[..., num_tokens:], v[:, num_tokens:]) for k, v in self.kv]
        blocks, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        self.num_tokens -= num_tokens
        return Segment(blocks, upper, num_tokens)


class _Pass(Layer):  # type: ignore[no-untyped-call]
    """K and V of one pass, as they come; before them there is nothing that transformers must know of."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class PackedRows(Generic[R]):
    """K and V of requests whose tokens are computed as one sequence without padding, prompts and replies together.

    The tokens of a request attend to its segments, whole, and to those of its own that come before them. Requests that
    share a prefix share segments, which form a tree, as in the cache. For those that decode, what comes behind the
    segments is kept in the tails, a row each, ragged on the left. Not thread-safe; under `torch.inference_mode` only.
    """

    def __init__(self, num_layers: int, layers: Sequence[int], store: KVStore, device: torch.device) -> None:
        """Nothing yet. `layers` are those of the model's `num_layers` that keep K and V, in the store's order."""
        self.order: list[R] = []
        self._layers = {index: i for i, index in enumerate(layers)}
        self._store = store
        self._device = device
        self._chains: dict[R, list[Segment]] = {}
        self._rows: dict[R, int] = {}  # of those that decode, in the tails
        self._lengths: dict[R, int] = {}  # of the tails
        self._tails: list[KV] = []  # a layer: K (rows, kv_heads, dim, columns), V (rows, kv_heads, columns, dim)
        self._end = 0  # the columns behind are room
        # of the pass: the tokens are those of `order`, one after the other
        self._kv = Cache(layers=[_Pass() for _ in range(num_layers)])
        self._segments: list[Segment] = []
        self._prompts: list[tuple[slice, bool]] = []  # the tokens of each that does not decode; if it has segments
        self._decoded: slice | list[int] = []  # the tokens of those that do, row by row
        self._blocked: torch.Tensor | None = None  # (rows, 1, 1, columns): what is not of the row
        self._lasts: list[int] = []  # the last token of each
        self._slots = torch.empty(0)
        self._seen: set[int] = set()  # layers that our attention has seen

    def clear(self) -> None:
        self.order, self._chains, self._rows, self._lengths = [], {}, {}, {}
        self._tails, self._end = [], 0

    def inputs(self, held: Mapping[R, tuple[Request, int]], tokens: Mapping[R, "array[int]"]) -> dict[str, Any]:
        """What to call the model with, to compute `tokens` of each request behind what is computed.

        `held` has what each holds of the cache, and of how many of its tokens the KV is in the store. Who computes one
        token is taken to decode, and stays; who computes more is copied out for one pass, but for what others have.
        """
        self._arrange(held, {request for request in held if len(tokens[request]) == 1})
        ends = [*accumulate(len(tokens[request]) for request in self.order)]
        spans = {r: slice(end - len(tokens[r]), end) for r, end in zip(self.order, ends, strict=True)}
        for segment in self._segments:
            sharing = [spans[request] for request in self.order if segment in self._chains[request]]
            segment.first, segment.last = sharing[0].start, sharing[-1].stop
        self._prompts = [(spans[r], bool(self._chains[r])) for r in self.order if r not in self._rows]
        self._decoded = [spans[request].start for request in self._rows] if self._prompts else slice(None)
        self._lasts = [end - 1 for end in ends]
        lengths = torch.tensor([*self._lengths.values()])[:, None, None, None]
        blocked = torch.arange(self._end + 1) < self._end - lengths
        self._blocked = blocked.to(self._device) if bool(blocked.any()) else None
        self._slots = _slots(self._store, self.order, held, tokens).to(self._device)
        self._seen.clear()
        ids = [token for request in self.order for token in tokens[request]]
        positions = [position for r in self.order for position in range(held[r][1], held[r][1] + len(tokens[r]))]
        return {
            "input_ids": torch.tensor([ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "logits_to_keep": torch.tensor(self._lasts, device=self._device),
            CACHE_ARGUMENT: self._kv,
            "radixkv_rows": self,
        }

    def last(self, logits: torch.Tensor) -> torch.Tensor:
        """Of what the model returned, the logits behind each request's last token, (rows, vocabulary) in `order`."""
        return logits[0] if logits.shape[1] == len(self._lasts) else logits[0, self._lasts]

    def write(self) -> None:
        """The model was called: bring what it computed to the store.

        Raises: RuntimeError where a layer did not use our attention on what it cached, so that the logits are wrong.
        """
        if self._seen != self._layers.keys():
            raise RuntimeError(
                f"the model used the engine's attention in {len(self._seen)} of {len(self._layers)} layers: "
                "was it set to another meanwhile?"
            )
        for index, i in self._layers.items():
            layer: Any = self._kv.layers[index]
            self._store.write(i, layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1), self._slots)
        self._lengths = {request: length + 1 for request, length in self._lengths.items()}
        self._end += bool(self._rows)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of all tokens of the pass, (1, tokens, heads, dim); takes `key` of those that decode to the tails.

        The parts are merged by the log-sum-exp of their scores, which is exact (Milakov and Gimelshein 2018, as in
        flash decoding). All queries to a segment are one matrix, so its K and V are read once.
        """
        i = self._layers[module.layer_idx]
        k, v = key[0], value[0]  # (kv_heads, tokens, dim)
        kv_heads, num_tokens, dim = k.shape
        q = (_wide(query[0]) * scale).reshape(kv_heads, -1, num_tokens, dim)  # (kv_heads, group, tokens, dim)
        out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(*q.shape[:3], 1)
        if self._rows:
            tail_k, tail_v = self._append(i, k[:, self._decoded], v[:, self._decoded])
            decoded = q[:, :, self._decoded].permute(2, 0, 1, 3)  # (rows, kv_heads, group, dim)
            parts = _attend(decoded, _wide(tail_k), _wide(tail_v), self._blocked)
            if self._prompts:
                for x, part in zip((out, lse), parts, strict=True):
                    x[:, :, self._decoded] = part.permute(1, 2, 0, 3)
            else:
                out, lse = (part.permute(1, 2, 0, 3) for part in parts)
        for span, has_segments in self._prompts:
            width = span.stop - span.start
            if not has_segments:
                part = sdpa_attention_forward(
                    module, query[:, :, span], key[:, :, span], value[:, :, span], None, scaling=scale
                )[0]
                out[:, :, span] = part[0].transpose(0, 1).reshape(kv_heads, -1, width, v.shape[-1])
                continue
            later = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1).repeat(q.shape[1], 1)
            parts = _attend(q[:, :, span].flatten(1, 2), _wide(k[:, span]).transpose(1, 2), _wide(v[:, span]), later)
            for x, part in zip((out, lse), parts, strict=True):
                x[:, :, span] = part.view(kv_heads, -1, width, part.shape[-1])
        for segment in self._segments:
            span = slice(segment.first, segment.last)
            part, part_lse = (
                x.view(kv_heads, -1, segment.last - segment.first, x.shape[-1])
                for x in _attend(q[:, :, span].flatten(1, 2), *segment.kv[i])
            )
            out[:, :, span].lerp_(part, torch.sigmoid(part_lse - lse[:, :, span]))
            if segment is not self._segments[-1]:
                lse[:, :, span] = torch.logaddexp(lse[:, :, span], part_lse)
        cached: Any = self._kv.layers[module.layer_idx]
        if key is cached.keys and value is cached.values:  # what is cached is what is attended to
            self._seen.add(module.layer_idx)
        return out.flatten(0, 1).transpose(0, 1)[None].to(query.dtype)

    def _append(self, i: int, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Put K and V of those that decode, (kv_heads, rows, dim), behind their tails; returns those."""
        if i == len(self._tails):
            self._tails.append(_tails(k[:, 0, :, None], v[:, 0, None], len(self._rows), 0))
        tail_k, tail_v = self._tails[i]
        tail_k[..., self._end] = k.transpose(0, 1)
        tail_v[:, :, self._end] = v.transpose(0, 1)
        return tail_k[..., : self._end + 1], tail_v[:, :, : self._end + 1]

    def _arrange(self, held: Mapping[R, tuple[Request, int]], decoding: set[R]) -> None:
        if max(self._lengths.values(), default=0) >= MAX_TAIL:
            self.clear()
        old = {request: row for request, row in self._rows.items() if request in decoding}
        self._chains = {request: self._chains[request] for request in old}
        for request, (hold, num_tokens) in held.items():
            if request not in old:
                self._chains[request] = self._join(hold, num_tokens, MIN_SEGMENT if request in decoding else 1)
        for request in decoding:
            chain = self._chains[request]
            if chain and chain[-1].num_tokens < MIN_SEGMENT:  # what was left when somebody came to share the rest
                chain.pop()
                old.pop(request, None)
        rank: dict[Segment, int] = {}
        for chain in self._chains.values():
            for segment in chain:
                rank.setdefault(segment, len(rank))
        self._segments = list(rank)
        # so that the tokens that attend to a segment lie side by side
        self.order = sorted(held, key=lambda request: [rank[segment] for segment in self._chains[request]])
        rows = {request: row for row, request in enumerate(r for r in self.order if r in decoding)}
        is_full = bool(self._tails) and self._end == self._tails[0][1].shape[2]
        if rows != self._rows or len(old) < len(rows) or is_full:
            self._move(rows, old, held)

    def _join(self, hold: Request, num_tokens: int, least: int) -> list[Segment]:
        """The segments of who is new: others' as far as they are the same, one of its own for `least` tokens left."""
        size, table = self._store.block_size, hold.block_table
        # subtle: whole blocks only: those are in the tree, held by all who have them, so none is another's meanwhile
        known = table[: num_tokens // size]
        chain: list[Segment] = []
        start = 0  # blocks
        while True:
            depth = len(chain)
            nexts = {other[depth] for other in self._chains.values() if other[:depth] == chain and len(other) > depth}
            common, found = max(
                ((_num_common(segment.blocks, known[start:]), segment) for segment in nexts),
                key=lambda pair: pair[0],
                default=(0, None),
            )
            if found is None or common * size < MIN_SEGMENT:
                break
            if common * size < found.num_tokens:
                lower, found = found, found.cut(common, common * size)
                for other in self._chains.values():
                    if lower in other:
                        other.insert(other.index(lower), found)
            chain.append(found)
            start += common
        if num_tokens - start * size >= least:
            kv = []
            for i in range(len(self._layers)):
                k, v = self._store.read(i, table[start:], num_tokens - start * size)
                kv.append((_wide(k.permute(1, 2, 0)).contiguous(), _wide(v.transpose(0, 1)).contiguous()))
            chain.append(Segment(known[start:], kv, num_tokens - start * size))
        return chain

    def _move(self, rows: dict[R, int], old: Mapping[R, int], held: Mapping[R, tuple[Request, int]]) -> None:
        """Bring the tails to where the rows are now, `old` from where they were and the others from the store."""
        starts = {request: sum(segment.num_tokens for segment in self._chains[request]) for request in rows}
        self._lengths = {request: held[request][1] - starts[request] for request in rows}
        self._rows = rows
        kept, were = [rows[request] for request in old], [*old.values()]
        before, self._tails = self._tails, []
        num, self._end = self._end, max(self._lengths.values(), default=0)
        kept_columns = min(num, self._end)
        for i in range(len(self._layers) if self._end else 0):
            read = {}
            for request, row in rows.items():
                if request not in old and self._lengths[request]:
                    blocks = held[request][0].block_table[starts[request] // self._store.block_size :]
                    k, v = self._store.read(i, blocks, self._lengths[request])
                    read[row] = k.permute(1, 2, 0), v.transpose(0, 1)
            like_k, like_v = next(iter(read.values())) if read else (before[i][0][0], before[i][1][0])
            tail_k, tail_v = _tails(like_k, like_v, len(rows), self._end)
            for row, (k, v) in read.items():
                tail_k[row, ..., self._end - k.shape[2] : self._end] = k
                tail_v[row, :, self._end - k.shape[2] : self._end] = v
            if kept and kept_columns:
                to, of = slice(self._end - kept_columns, self._end), slice(num - kept_columns, num)
                tail_k[kept, ..., to] = before[i][0][were][..., of]
                tail_v[kept, :, to] = before[i][1][were][:, :, of]
            self._tails.append((tail_k, tail_v))


def register() -> None:
    """Tell transformers of our attention. A model that is set to it does as with SDPA, unless it is given rows."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    radixkv_rows: PackedRows[Any] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`PackedRows.attend`, where rows are given; else what transformers does with SDPA."""
    unknown = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if radixkv_rows is None or unknown:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return radixkv_rows.attend(module, query, key, value, scale), None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocked: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` (..., queries, dim), scaled, to `k` (..., dim, columns), and the log-sum-exp of its scores."""
    scores = q @ k
    if blocked is not None:
        scores.masked_fill_(blocked, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.softmax(-1)  # the largest is exp(top - lse)
    return weights @ v, top - weights.amax(-1, keepdim=True).log()


def _tails(k: torch.Tensor, v: torch.Tensor, num_rows: int, end: int) -> KV:
    """Room for so many rows of K (kv_heads, dim, any) and V (kv_heads, any, dim); nothing in it is nan."""
    columns = end + _ROOM
    return k.new_zeros(num_rows, *k.shape[:2], columns), v.new_zeros(num_rows, v.shape[0], columns, v.shape[2])


def _slots(
    store: KVStore, order: Sequence[R], held: Mapping[R, tuple[Request, int]], tokens: Mapping[R, "array[int]"]
) -> torch.Tensor:
    """Where in the store the tokens go, request after request."""
    return torch.cat(
        [store.slot_mapping(held[r][0].block_table, held[r][1], held[r][1] + len(tokens[r])) for r in order]
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In single precision at least: scores in half precision would be off by percents."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _num_common(a: "array[int]", b: "array[int]") -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
