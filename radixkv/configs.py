"""From a model's `config.json` to what `radixkv.models` knows of it; presets of well-known models.

Knows the fields that public configs have, and what each model type's code does that its config does not say.
"""

import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from radixkv.models import LINEAR_PARTS, Layers, Model, Weights

_MOST = 1 << 31
_MOST_LAYERS = 1 << 12
_OUTER = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")  # may stand around a nested config
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")


class ConfigError(ValueError):
    """A model cannot be read from its config. The message is one line that names file and field."""


class _MissingError(ConfigError):
    """A field is not there."""


def load_model(path: str | os.PathLike[str]) -> Model:
    """Read a `config.json`, or that in a model's folder.

    Raises: ConfigError, one line that names the file and the field.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    except (RecursionError, ValueError):  # nested too deeply, or an int of thousands of digits
        raise ConfigError(f"{file}: not JSON that can be read") from None
    folder = file.absolute().parent.name
    return read_model(config, str(file), name=folder if file.name == "config.json" and folder else file.name)


def find_model(name: str) -> Model:
    """A preset by its name, in any case, with or without organisation and suffixes such as -Instruct.

    Raises: ValueError, with names that are near.
    """
    short = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-").removeprefix("meta-")
    for suffix in ("-hf", "-it", "-instruct", "-thinking", "-chat", "-base"):
        short = short.removesuffix(suffix)
    short = _ALIASES.get(short, short)
    if short not in PRESETS:
        near = get_close_matches(short, [*PRESETS, *_ALIASES], n=3, cutoff=0.5)
        known = f"near: {', '.join(near)}" if near else f"known: {', '.join(PRESETS)}"
        raise ValueError(f"{name[:60]!r} is no preset; {known}")
    return read_model(PRESETS[short], short, name=short)


def read_model(config: object, file: str = "config", *, name: str = "") -> Model:
    """A model from the fields of its `config.json`; `file` is what errors name.

    Without a field that KV needs this fails; without one that only the parameters need, `weights` is empty and
    `why_no_weights` says which.

    Raises: ConfigError.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: must be a JSON object, got {reprlib.repr(config)}")
    return _Reader(_Fields(config, file).nested()).model(name or file)


class _Fields:
    """The fields of a config. Null is as good as missing."""

    def __init__(self, values: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self._values = values
        self._file = file
        self._prefix = prefix

    def nested(self) -> "_Fields":
        """Those of the language model inside a multi-modal one, else these."""
        for name in _NESTED:
            if isinstance(self.get(name), dict):
                outer = {key: self._values[key] for key in _OUTER if key in self._values}
                inner = self.inner(name)
                return inner.updated({**outer, **inner.values()}).nested()
        return self

    def inner(self, *names: str) -> "_Fields":
        """Those of an object in the first of these fields that is there; else none."""
        name = next(filter(self.has, names), "")
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {reprlib.repr(value)}")
        return _Fields(value or {}, self._file, f"{self._prefix}{name}.")

    def names(self) -> list[str]:
        return list(self._values)

    def values(self) -> dict[str, Any]:
        return dict(self._values)

    def updated(self, values: Mapping[str, Any]) -> "_Fields":
        return _Fields({**self._values, **values}, self._file, self._prefix)

    def error(self, name: str, message: str) -> ConfigError:
        return ConfigError(f"{self._file}: {self._prefix}{name}: {message}")

    def missing(self, name: str, message: str = "missing") -> ConfigError:
        return _MissingError(str(self.error(name, message)))

    def get(self, *names: str) -> Any:
        """The first of these fields that is there, else None."""
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def has(self, *names: str) -> bool:
        return self.get(*names) is not None

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """The first of these fields that is there."""
        name = next(filter(self.has, names), "")
        if not name:
            if default is None:
                raise self.missing(names[0])
            return default
        value = self._values[name]
        if type(value) is not int or not least <= value <= most:
            raise self.error(name, f"must be an int in [{least}, {most}], got {reprlib.repr(value)}")
        return value

    def items(self, *names: str) -> list[Any]:
        """The first of these fields that is there, a list; else an empty one."""
        name = next(filter(self.has, names), "")
        value = self.get(name)
        if value is None or type(value) is list:
            return value or []
        raise self.error(name, f"must be a list, got {reprlib.repr(value)}")

    def text(self, *names: str) -> str:
        """The first of these fields that is there, else an empty text."""
        value = self.get(*names)
        return value if isinstance(value, str) else ""

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True, slots=True)
class _Family:
    """What the code of a model type does and its configs do not say."""

    norms: int = 2  # vectors of hidden_size a layer
    qk_norm: str = ""  # "head": one for all heads; "all": one for each; "flag": one for all, with use_qk_norm
    qkv_bias: bool = False  # always
    o_bias: bool = True  # with attention_bias
    tied: bool = False  # without tie_word_embeddings
    full_every: int = 0  # without a pattern, one layer in so many sees beyond the window
    all_heads: bool = False  # without num_key_value_heads, each query head has its own
    own_head_dim: bool = False  # head_dim is not hidden_size / num_attention_heads: it must be there
    gated_attention: bool = False  # queries come with a gate of the output
    gated_mlp: bool = True  # three matrices, not two
    shared_as_routed: bool = False  # one shared expert, of the size of the routed ones
    sinks: bool = False  # a logit a head that takes part in the softmax
    expert_bias: bool = False


_DEEPSEEK = _Family(all_heads=True)
_QWEN3 = _Family(qk_norm="head", own_head_dim=True)
_QWEN_NEXT = _Family(qk_norm="head", own_head_dim=True, gated_attention=True)
_FAMILIES = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "gemma": _Family(tied=True, own_head_dim=True),
    "gemma2": _Family(norms=4, tied=True, full_every=2, own_head_dim=True),
    "gemma3_text": _Family(norms=4, qk_norm="head", tied=True, full_every=6, own_head_dim=True),
    "gemma4_text": _Family(norms=4, qk_norm="head", tied=True, own_head_dim=True),
    "glm4_moe": _Family(qk_norm="flag", o_bias=False),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "gpt2": _Family(all_heads=True),
    "gpt_oss": _Family(full_every=2, own_head_dim=True, sinks=True, expert_bias=True),
    "granite": _Family(all_heads=True),
    "granitemoehybrid": _Family(all_heads=True),
    "jamba": _Family(),
    "kimi_k2": _DEEPSEEK,
    "llama": _Family(all_heads=True),
    "llama4_text": _Family(own_head_dim=True, shared_as_routed=True),
    "minimax_m2": _Family(qk_norm="all", own_head_dim=True),
    "mistral": _Family(),
    "mixtral": _Family(),
    "nemotron_h": _Family(norms=1, gated_mlp=False, own_head_dim=True),
    "olmo2": _Family(qk_norm="all", all_heads=True),
    "olmo3": _Family(qk_norm="all", all_heads=True, full_every=4),
    "phi3": _Family(all_heads=True),
    "qwen2": _Family(qkv_bias=True, o_bias=False),
    "qwen2_moe": _Family(qkv_bias=True, o_bias=False),
    "qwen3": _QWEN3,
    "qwen3_5_moe_text": _QWEN_NEXT,
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_moe": _Family(qk_norm="head"),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "smollm3": _Family(tied=True),
}
_REFUSED = (  # fields of layouts whose KV the formulas would get wrong
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "hybrid_layer_pattern",
    "linear_attn_config",
    "sparse_attention_config",
)
_MIXERS = {  # by the names in layer_types and layers_block_type
    "attention": "full",
    "chunked_attention": "chunk",
    "full_attention": "full",
    "indexed_attention": "full",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mlp": "none",
    "moe": "none",
    "sliding_attention": "window",
}
_OTHER_WIDTHS = ("intermediate_size_mlp", "shared_intermediate_size")  # of an MLP, before intermediate_size
_LETTERS = {"M": ("mamba", "none"), "*": ("full", "none"), "-": ("none", "mlp"), "E": ("none", "moe")}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class _Delta:
    """Linear attention with a gated delta rule."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of all heads
    value_dim: int
    state: int  # elements
    kernel: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class _Mamba:
    """A state-space layer: the second Mamba where it has groups, else the first."""

    inner: int
    num_heads: int  # what tensor parallelism can split
    state: int  # elements a channel
    groups: int
    kernel: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state


class _Reader:
    """Makes a model of the fields of a config."""

    def __init__(self, fields: _Fields) -> None:
        self.fields = fields
        model_type = fields.text("model_type")
        known = _FAMILIES.get(model_type) or _FAMILIES.get(f"{model_type}_text")
        self.notes: list[str] = []
        if known is None:
            name = f"model_type {model_type[:40]!r} is not known" if model_type else "the config names no model_type"
            self.notes.append(f"{name}: what its fields suggest is counted")
        self.family = known or _Family()
        for name in _REFUSED:
            if fields.has(name):
                raise fields.error(name, "a layout of KV that is not known here")
        if fields.flag("is_encoder_decoder"):
            raise fields.error("is_encoder_decoder", "only models of a decoder alone are known here")
        self.heads = fields.number("num_attention_heads", "n_head")
        self.mixers = self._mixers()

    def model(self, name: str) -> Model:
        fields = self.fields
        dtype = _DTYPES.get(fields.text("dtype", "torch_dtype").removeprefix("torch."), "")
        if not dtype:
            dtype = "bf16"
            self.notes.append("the config names no dtype that is known: bf16")
        layers = tuple(self._layers())
        if not layers:
            raise fields.error("num_hidden_layers", "no layer keeps anything of a sequence")
        weights: tuple[Weights, ...] = ()
        experts = (0, 0)
        why_no_weights = ""
        try:
            experts = self._experts()
            weights = tuple(self._weights(experts))
        except _MissingError as error:
            why_no_weights = str(error)
        return Model(
            name=name,
            num_heads=self.heads,
            layers=layers,
            weights=weights,
            why_no_weights=why_no_weights,
            experts=experts,
            dtype=dtype,
            state_dtype=_DTYPES.get(fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype"), "fp32"),
            formats=_weight_formats(fields),
            notes=tuple(self.notes),
        )

    # What layers there are

    def _mixers(self) -> list[str]:
        """What mixes the tokens in each layer: full, window or chunk attention, linear attention, mamba or none."""
        fields = self.fields
        letters = fields.text("hybrid_override_pattern")
        if letters:
            if not set(letters) <= set(_LETTERS):
                raise fields.error("hybrid_override_pattern", f"must be of {', '.join(_LETTERS)}, got {letters!r:.60}")
            return [_LETTERS[letter][0] for letter in letters]
        types = fields.items("layer_types", "layers_block_type")
        num = fields.number("num_hidden_layers", "n_layer", default=len(types) or None, most=_MOST_LAYERS)
        if types:
            return self._listed_mixers(types, num)
        if fields.has("attn_layer_period"):
            period, offset = fields.number("attn_layer_period"), fields.number("attn_layer_offset", least=0)
            return ["full" if index % period == offset else "mamba" for index in range(num)]
        if fields.has("linear_num_value_heads"):
            return _every("full", fields.number("full_attention_interval", default=4), "linear", num)
        if fields.has("attention_chunk_size"):
            return _every("full", fields.number("no_rope_layer_interval", default=4), "chunk", num)
        if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=True):
            return ["full"] * num
        if fields.has("use_sliding_window"):  # Qwen: the first layers see everything
            first = fields.number("max_window_layers", default=num, least=0)
            return ["full" if index < first else "window" for index in range(num)]
        default = self.family.full_every
        every = fields.number("sliding_window_pattern", "_sliding_window_pattern", default=default, least=0)
        return _every("full", every, "window", num)

    def _listed_mixers(self, types: list[Any], num: int) -> list[str]:
        fields = self.fields
        name = "layer_types" if fields.has("layer_types") else "layers_block_type"
        if len(types) != num:
            raise fields.error(name, f"has {len(types)} layers, but num_hidden_layers is {num}")
        mixers = dict(_MIXERS)
        if fields.has("ssm_state_size", "mamba_d_state"):
            mixers["linear_attention"] = "mamba"
        for index, kind in enumerate(types):
            if not isinstance(kind, str) or kind not in mixers:
                raise fields.error(f"{name}[{index}]", f"must be one of {', '.join(mixers)}, got {reprlib.repr(kind)}")
        return [mixers[kind] for kind in types]

    def _ffns(self, num_experts: int) -> list[str]:
        """What follows the mixer in each layer: mlp, moe, both or none."""
        fields = self.fields
        num = len(self.mixers)
        letters = fields.text("hybrid_override_pattern")
        if letters:
            return [_LETTERS[letter][1] for letter in letters]
        types = fields.items("layers_block_type")
        if "moe" in types or "mlp" in types:
            return [kind if kind in ("moe", "mlp") else "none" for kind in types]
        if not num_experts:
            return ["mlp"] * num
        if fields.flag("enable_moe_block"):  # Gemma 4
            return ["both"] * num
        types = fields.items("mlp_layer_types")
        if len(types) == num:
            return ["moe" if kind == "sparse" else "mlp" for kind in types]
        sparse, dense = fields.items("moe_layers") or range(num), fields.items("mlp_only_layers")
        first = fields.number("first_k_dense_replace", default=0, least=0)
        step = fields.number("decoder_sparse_step", "interleave_moe_layer_step", default=1)
        period = fields.number("expert_layer_period", default=1)
        offset = fields.number("expert_layer_offset", default=0, least=0)
        return [
            "moe"
            if i in sparse and i not in dense and i >= first and (i + 1) % step == 0 and i % period == offset
            else "mlp"
            for i in range(num)
        ]

    def _experts(self) -> tuple[int, int]:
        """How many a token uses, and how many there are."""
        there = self.fields.number("num_local_experts", "n_routed_experts", "num_experts", default=0, least=0)
        return (self.fields.number("num_experts_per_tok", "top_k_experts", most=there), there) if there else (0, 0)

    # Their dimensions

    def _attention(self, kind: str) -> tuple[int, int, int]:
        """Of a layer of this kind, the KV heads and the dimensions of a key and a value."""
        fields, family = self._fields_of(kind), self.family
        kv_heads = fields.number(
            "num_key_value_heads", "num_kv_heads", default=self.heads if family.all_heads else None
        )
        if self.heads % kv_heads:
            raise fields.error("num_key_value_heads", f"must divide the {self.heads} attention heads, got {kv_heads}")
        if fields.has("head_dim", "attention_head_dim") or family.own_head_dim:
            dim = fields.number("head_dim", "attention_head_dim")
        else:
            hidden = fields.number("hidden_size", "n_embd")
            if hidden % self.heads:
                raise fields.error("head_dim", f"missing, and {self.heads} heads do not divide hidden_size {hidden}")
            dim = hidden // self.heads
        return kv_heads, dim, fields.number("v_head_dim", default=dim)

    def _fields_of(self, kind: str) -> _Fields:
        """The fields as they hold for layers of this kind: Gemma 4 has other heads where attention is full."""
        fields = self.fields
        given = fields.inner("per_layer_config")
        own = [given.inner(str(index)).values() for index, mixer in enumerate(self.mixers) if mixer == kind]
        if any(entry != own[0] for entry in own):
            raise fields.error("per_layer_config", "a layout of KV that is not known here")
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        wide = {name: fields.get(other) for name, other in names.items() if kind == "full" and fields.has(other)}
        return fields.updated({**wide, **own[0]})

    def _delta(self) -> _Delta:
        fields = self.fields
        key_heads, value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
        key, value = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
        kernel = fields.number("linear_conv_kernel_dim")
        return _Delta(key_heads, value_heads, key_heads * key, value_heads * value, value_heads * key * value, kernel)

    def _mamba(self) -> _Mamba:
        fields = self.fields
        state, kernel = fields.number("ssm_state_size", "mamba_d_state"), fields.number("conv_kernel", "mamba_d_conv")
        if fields.has("mamba_dt_rank"):
            inner = fields.number("mamba_expand") * fields.number("hidden_size")
            return _Mamba(inner, inner, state, 0, kernel)
        heads = fields.number("mamba_num_heads", "mamba_n_heads")
        inner = heads * fields.number("mamba_head_dim", "mamba_d_head")
        return _Mamba(inner, heads, state, fields.number("n_groups", "mamba_n_groups"), kernel)

    def _num_indexers(self, num: int) -> int:
        """Of the layers with sparse attention, those that choose the tokens; the others reuse the last choice."""
        types = self.fields.items("indexer_types")
        return types.count("full") if types else num

    # What they keep

    def _layers(self) -> Iterator[Layers]:
        fields = self.fields
        num_shared = fields.number("num_kv_shared_layers", default=0, least=0, most=len(self.mixers))
        own = self.mixers[: len(self.mixers) - num_shared]  # the last ones read the KV of earlier ones
        for kind, num in Counter(own).items():
            if kind == "linear":
                delta = self._delta()
                conv = delta.channels * (delta.kernel - 1)
                yield Layers(kind, num, delta.num_key_heads, state_elements=delta.state, conv_elements=conv)
            elif kind == "mamba":
                mamba = self._mamba()
                conv, state = mamba.channels * (mamba.kernel - 1), mamba.inner * mamba.state
                yield Layers(kind, num, mamba.num_heads, state_elements=state, conv_elements=conv)
            elif kind != "none" and fields.has("kv_lora_rank"):
                yield from self._latent_layers(num)
            elif kind != "none":
                kv_heads, key, value = self._attention(kind)
                names = {"window": "sliding_window", "chunk": "attention_chunk_size"}
                keeps = fields.number(names[kind]) if kind in names else None
                flops = 2 * self.heads * (key + value)
                yield Layers(kind, num, kv_heads, (key, value), keeps, keeps, flops, flops)

    def _latent_layers(self, num: int) -> Iterator[Layers]:
        fields = self.fields
        rank, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        head = fields.number("qk_nope_head_dim") + rope + fields.number("v_head_dim")
        topk = fields.number("index_topk") if fields.has("index_topk") else None
        if topk:
            dim = fields.number("index_head_dim")
            flops = 2 * fields.number("index_n_heads") * dim
            yield Layers("index", self._num_indexers(num), 1, (dim,), prefill_flops=flops, decode_flops=flops)
        # prefill multiplies whole heads, decode the latent itself
        prefill, decode = 2 * self.heads * head, 2 * self.heads * (2 * rank + rope)
        yield Layers("latent", num, 1, (rank, rope), None, topk, prefill, decode)

    # What they weigh

    def _weights(self, experts: tuple[int, int]) -> Iterator[Weights]:
        fields, family = self.fields, self.family
        hidden, vocab = fields.number("hidden_size", "n_embd"), fields.number("vocab_size")
        if fields.get("hidden_size_per_layer_input"):
            raise fields.missing("hidden_size_per_layer_input", "inputs of each layer are not counted here")
        tied = fields.flag("tie_word_embeddings", default=family.tied)
        yield Weights("embedding", vocab * hidden, 0)
        yield Weights("head", 0 if tied else vocab * hidden, vocab * hidden)
        yield _small(hidden * (family.norms * len(self.mixers) + 1))
        for kind, num in Counter(self.mixers).items():
            if kind == "linear":
                yield from self._delta_weights(hidden, num)
            elif kind == "mamba":
                yield from self._mamba_weights(hidden, num)
            elif kind != "none" and fields.has("kv_lora_rank"):
                yield from self._latent_weights(hidden, num)
            elif kind != "none":
                yield from self._attention_weights(hidden, num, kind)
        for kind, num in Counter(self._ffns(experts[1])).items():
            if kind in ("mlp", "both"):
                width = fields.number(next(filter(fields.has, _OTHER_WIDTHS), "intermediate_size"))
                matrices = 3 if family.gated_mlp else 2
                yield _part("mlp", num * matrices * hidden * width)
                yield _small(num * ((matrices - 1) * width + hidden) if fields.flag("mlp_bias") else 0)
            if kind in ("moe", "both"):
                yield from self._moe_weights(hidden, num, experts)
            if kind == "both":
                yield _small(num * (4 * hidden + experts[1]))

    def _attention_weights(self, hidden: int, num: int, kind: str) -> Iterator[Weights]:
        fields, family = self.fields, self.family
        kv_heads, key, value = self._attention(kind)
        queries, keys, values = self.heads * key, kv_heads * key, kv_heads * value
        small = self.heads if family.sinks else 0
        if fields.flag("attention_bias", default=family.qkv_bias):
            small += queries + keys + values + (hidden if family.o_bias else 0)
        if family.qk_norm == "all":
            small += queries + keys
        elif family.qk_norm == "head" or (family.qk_norm == "flag" and fields.flag("use_qk_norm")):
            small += 2 * key
        if kind == "full" and fields.flag("attention_k_eq_v"):
            values = 0
        outputs = self.heads * value
        yield _part("attention", num * hidden * (queries * (2 if family.gated_attention else 1) + outputs), self.heads)
        yield _part("attention", num * hidden * (keys + values), kv_heads)
        yield _small(num * small)

    def _latent_weights(self, hidden: int, num: int) -> Iterator[Weights]:
        fields, heads = self.fields, self.heads
        rank, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        nope, value = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
        q_rank = fields.number("q_lora_rank", default=0)  # 0: queries are not compressed
        yield _part("attention", num * heads * (q_rank or hidden) * (nope + rope), heads)
        yield _part("attention", num * heads * (rank * (nope + value) + value * hidden), heads)
        yield _part("attention", num * hidden * (q_rank + rank + rope), 1)
        yield _small(num * (q_rank + rank))
        if fields.has("index_topk"):
            num = self._num_indexers(num)
            index_heads, dim = fields.number("index_n_heads"), fields.number("index_head_dim")
            yield _part("attention", num * (q_rank * index_heads * dim + hidden * (dim + index_heads)), 1)
            yield _small(num * 2 * dim)

    def _delta_weights(self, hidden: int, num: int) -> Iterator[Weights]:
        delta = self._delta()
        columns = delta.channels + 2 * delta.value_dim + 2 * delta.num_value_heads
        yield _part("mixer", num * hidden * columns, delta.num_key_heads)
        head = delta.value_dim // delta.num_value_heads
        yield _small(num * (delta.channels * delta.kernel + 2 * delta.num_value_heads + head))

    def _mamba_weights(self, hidden: int, num: int) -> Iterator[Weights]:
        fields = self.fields
        mamba = self._mamba()
        inner = mamba.inner
        bias = fields.flag("use_conv_bias", default=fields.flag("mamba_conv_bias", default=True))
        conv = mamba.channels * (mamba.kernel + bias)
        if mamba.groups:
            yield _part("mixer", num * hidden * (2 * inner + mamba.channels + mamba.num_heads), mamba.num_heads)
            yield _small(num * (conv + 3 * mamba.num_heads + inner))
            return
        automatic = fields.get("mamba_dt_rank") == "auto"
        rank = -(-hidden // 16) if automatic else fields.number("mamba_dt_rank")
        yield _part("mixer", num * inner * (3 * hidden + 2 * rank + 2 * mamba.state))
        yield _small(num * (conv + inner * (2 + mamba.state) + rank + 2 * mamba.state))

    def _moe_weights(self, hidden: int, num: int, experts: tuple[int, int]) -> Iterator[Weights]:
        fields, family = self.fields, self.family
        used, there = experts
        width = fields.number("moe_intermediate_size", "intermediate_size")
        latent = fields.number("moe_latent_size", default=hidden)
        matrices = 3 if family.gated_mlp else 2
        each = num * matrices * latent * width
        yield Weights("experts", there * each, used * each)
        yield _part("router", num * there * hidden, 1)
        names = "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
        num_shared = 1 if family.shared_as_routed else fields.number("n_shared_experts", default=0, least=0)
        shared = fields.number(*names, default=num_shared * width, least=0)
        yield _part("shared", num * matrices * hidden * shared)
        yield _part("shared", num * 2 * hidden * latent if latent != hidden else 0)
        yield _small(num * hidden if fields.get(names[0]) else 0)  # a gate
        if family.expert_bias:
            bias = num * (2 * width + hidden + 1)
            yield Weights("small", there * bias, used * bias, 1)


def _every(one: str, period: int, other: str, num: int) -> list[str]:
    return [one if period and (index + 1) % period == 0 else other for index in range(num)]


def _part(name: str, num: int, pieces: int = 0) -> Weights:
    return Weights(name, num, num, pieces)


def _small(num: int) -> Weights:
    """Norms, biases and the like: each GPU has them."""
    return Weights("small", num, num, 1)


def _weight_formats(fields: _Fields) -> dict[str, str]:
    """The format of each part that the config says is quantised."""
    if not fields.has("quantization_config"):
        return {}
    config = fields.inner("quantization_config")
    groups = config.inner("config_groups")
    weights = groups.inner(*groups.names()[:1]).inner("weights")
    told = [config.text("quant_method"), config.text("quant_algo"), config.text("format"), weights.text("type")]
    words = " ".join(told).lower()
    bits = weights.get("num_bits") or config.get("bits", "w_bit")
    if config.flag("load_in_4bit") or config.flag("_load_in_4bit"):
        bits = 4
    elif config.flag("load_in_8bit") or config.flag("_load_in_8bit"):
        bits = 8
    if "fp4" in words:
        name = "mxfp4" if "mxfp4" in words else "nvfp4"
    elif "fp8" in words or "float" in words:
        name = "nvfp4" if bits == 4 else "fp8"
    elif bits in (4, 8):
        name = f"int{bits}"
    else:
        raise fields.error("quantization_config", f"the format of weights is not known: {words.strip()!r:.60}")
    kept = [str(name) for name in config.items("modules_to_not_convert", "ignore") if "*" in str(name)]
    words_of = {"attention": "attn", "shared": "shared_expert"}
    bare = {part for part, word in words_of.items() if any(word in name for name in kept)}
    return dict.fromkeys(LINEAR_PARTS - bare, name)


# Presets: fields of public configs, docs/plan.md says from where


def _config(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, width: int
) -> dict[str, object]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "intermediate_size": width,
        "dtype": "bfloat16",
    }


def _moe(experts: int, per_token: int, width: int, *, shared: int = 0) -> dict[str, object]:
    """Routed and shared experts of the same size."""
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
    }


def _delta(value_heads: int) -> dict[str, object]:
    return {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _mamba2(heads: int, state: int, pattern: str) -> dict[str, object]:
    return {
        "head_dim": 128,
        "mamba_num_heads": heads,
        "mamba_head_dim": 64,
        "ssm_state_size": state,
        "n_groups": 8,
        "conv_kernel": 4,
        "hybrid_override_pattern": pattern,
    }


def _mla(q_rank: int, nope: int, value: int) -> dict[str, object]:
    return {
        "q_lora_rank": q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": value,
    }


def _dsa(heads: int) -> dict[str, object]:
    return {"index_n_heads": heads, "index_head_dim": 128, "index_topk": 2048}


def _window(size: int, head_dim: int) -> dict[str, object]:
    return {"sliding_window": size, "head_dim": head_dim}


_TIED = {"tie_word_embeddings": True}
_FP8 = {"quantization_config": {"quant_method": "fp8"}}
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
_GPT_OSS = _window(128, 64) | _MXFP4 | {"attention_bias": True}

PRESETS: dict[str, dict[str, object]] = {
    "deepseek-v3": _config("deepseek_v3", 61, 7168, 128, 128, 129280, 18432)
    | _mla(1536, 128, 128)
    | _moe(256, 8, 2048, shared=1)
    | _FP8
    | {"first_k_dense_replace": 3},
    "deepseek-v3.2": _config("deepseek_v32", 61, 7168, 128, 128, 129280, 18432)
    | _mla(1536, 128, 128)
    | _dsa(64)
    | _moe(256, 8, 2048, shared=1)
    | _FP8
    | {"first_k_dense_replace": 3},
    "gemma-2-9b": _config("gemma2", 42, 3584, 16, 8, 256000, 14336) | _window(4096, 256),
    "gemma-2-27b": _config("gemma2", 46, 4608, 32, 16, 256000, 36864) | _window(4096, 128),
    "gemma-3-27b": _config("gemma3_text", 62, 5376, 32, 16, 262208, 21504) | _window(1024, 128),
    "gemma-4-26b-a4b": _config("gemma4_text", 30, 2816, 16, 8, 262144, 2112)
    | _window(1024, 256)
    | _moe(128, 8, 704)
    | {"sliding_window_pattern": 6, "enable_moe_block": True}
    | {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "glm-5": _config("glm_moe_dsa", 78, 6144, 64, 64, 154880, 12288)
    | _mla(2048, 192, 256)
    | _dsa(32)
    | _moe(256, 8, 2048, shared=1)
    | {"first_k_dense_replace": 3},
    "gpt-oss-20b": _config("gpt_oss", 24, 2880, 64, 8, 201088, 2880) | _moe(32, 4, 2880) | _GPT_OSS,
    "gpt-oss-120b": _config("gpt_oss", 36, 2880, 64, 8, 201088, 2880) | _moe(128, 4, 2880) | _GPT_OSS,
    "jamba-v0.1": _config("jamba", 32, 4096, 32, 8, 65536, 14336)
    | _moe(16, 2, 14336)
    | {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_dt_rank": 256},
    "kimi-k2": _config("kimi_k2", 61, 7168, 64, 64, 163840, 18432)
    | _mla(1536, 128, 128)
    | _moe(384, 8, 2048, shared=1)
    | _FP8
    | {"first_k_dense_replace": 1},
    "llama-2-7b": _config("llama", 32, 4096, 32, 32, 32000, 11008),
    "llama-3-70b": _config("llama", 80, 8192, 64, 8, 128256, 28672),
    "llama-3.1-8b": _config("llama", 32, 4096, 32, 8, 128256, 14336),
    "llama-3.1-405b": _config("llama", 126, 16384, 128, 8, 128256, 53248),
    "llama-3.2-1b": _config("llama", 16, 2048, 32, 8, 128256, 8192) | _TIED,
    "llama-4-scout": _config("llama4_text", 48, 5120, 40, 8, 202048, 8192)
    | _moe(16, 1, 8192, shared=1)
    | {"head_dim": 128, "attention_chunk_size": 8192},
    "minimax-m2": _config("minimax_m2", 62, 3072, 48, 8, 200064, 1536) | _moe(256, 8, 1536) | _FP8 | {"head_dim": 128},
    "mistral-7b-v0.1": _config("mistral", 32, 4096, 32, 8, 32000, 14336) | _window(4096, 128),
    "mistral-7b-v0.3": _config("mistral", 32, 4096, 32, 8, 32768, 14336),
    "mixtral-8x7b": _config("mixtral", 32, 4096, 32, 8, 32000, 14336) | _moe(8, 2, 14336),
    "nemotron-3-nano-30b-a3b": _config("nemotron_h", 52, 2688, 32, 2, 131072, 1856)
    | _moe(128, 6, 1856, shared=2)
    | _mamba2(64, 128, "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"),
    "nemotron-h-56b": _config("nemotron_h", 118, 8192, 64, 8, 131072, 32768)
    | _mamba2(256, 256, "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"),
    "phi-4": _config("phi3", 40, 5120, 40, 10, 100352, 17920),
    "qwen2.5-7b": _config("qwen2", 28, 3584, 28, 4, 152064, 18944),
    "qwen2.5-72b": _config("qwen2", 80, 8192, 64, 8, 152064, 29568),
    "qwen3-8b": _config("qwen3", 36, 4096, 32, 8, 151936, 12288) | {"head_dim": 128},
    "qwen3-32b": _config("qwen3", 64, 5120, 64, 8, 151936, 25600) | {"head_dim": 128},
    "qwen3-30b-a3b": _config("qwen3_moe", 48, 2048, 32, 4, 151936, 6144) | _moe(128, 8, 768) | {"head_dim": 128},
    "qwen3-235b-a22b": _config("qwen3_moe", 94, 4096, 64, 4, 151936, 12288) | _moe(128, 8, 1536) | {"head_dim": 128},
    "qwen3-next-80b-a3b": _config("qwen3_next", 48, 2048, 16, 2, 151936, 5120)
    | _delta(32)
    | _moe(512, 10, 512)
    | {"shared_expert_intermediate_size": 512},
    "qwen3.5-27b": _config("qwen3_5_text", 64, 5120, 24, 4, 248320, 17408) | _delta(48),
    "qwen3.5-35b-a3b": _config("qwen3_5_moe_text", 40, 2048, 16, 2, 248320, 512)
    | _delta(32)
    | _moe(256, 8, 512)
    | {"shared_expert_intermediate_size": 512},
    "smollm2-135m": _config("llama", 30, 576, 9, 3, 49152, 1536) | _TIED,
}
_ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "minimax-m2.5": "minimax-m2",
    "mistral-7b": "mistral-7b-v0.3",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
}
