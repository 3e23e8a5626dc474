"""Sizes and counts against published ones, and the formulas of docs/plan.md against their definitions."""

import json
import math
import warnings
from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.configs import PRESETS, ConfigError, find_model, load_model, read_model
from radixkv.models import FORMATS, KV_FORMATS, Layers, Model, Weights
from radixkv.plan import (
    GIB,
    GPUS,
    Deployment,
    Gpu,
    Prices,
    Target,
    Workload,
    assumptions,
    choose,
    deployments,
    estimate,
    find_gpu,
    fits_heads,
    one_request,
    serve,
    smallest_cache,
    trace_workload,
)
from radixkv.replay import replay
from radixkv.synthetic import synthetic_trace
from radixkv.trace import IdRequest, IdTrace

H100 = GPUS["h100"]
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
presets = st.sampled_from(sorted(PRESETS))
tokens = st.integers(1, 300_000)


@st.composite
def deployed(draw):
    model = find_model(draw(presets))
    tp = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if fits_heads(model, size)]))
    gpu = GPUS[draw(st.sampled_from(sorted(GPUS)))]
    return Deployment(model, gpu, tp=tp, kv_format=draw(st.sampled_from(KV_FORMATS)))


# Published sizes


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-2-7b", 524_288),
        ("llama-3-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-405b", 516_096),
        ("mistral-7b-v0.3", 131_072),
        ("mixtral-8x7b", 131_072),
        ("qwen2.5-7b", 57_344),
        ("qwen2.5-72b", 327_680),
        ("deepseek-v3", 70_272),
        ("gpt-oss-20b", 49_152),
        ("gpt-oss-120b", 73_728),
    ],
)
def test_kv_of_a_token_is_as_published(name, published):
    model = find_model(name)
    assert model.kv_bytes_per_token("fp16") == published
    assert model.kv_bytes_per_token("fp8") == published / 2


def test_half_the_layers_of_gpt_oss_keep_a_window_only():
    model = find_model("gpt-oss-20b")
    assert model.kv_bytes_per_token("bf16", beyond_windows=True) == 24_576
    assert model.request_bytes(100, "bf16") == 100 * 49_152
    assert model.request_bytes(131_072, "bf16") == 131_072 * 24_576 + 128 * 24_576


def test_sparse_attention_keeps_an_index_of_8_bits_beside_the_latent():
    assert find_model("deepseek-v3.2").kv_bytes_per_token("bf16") == 61 * (576 * 2 + 128 + 4)


# Exact: transformers' own modules (test_parameters_are_those_of_transformers). Published: the models' cards, with the
# digits that they give; of the three multi-modal ones the count is without the vision tower.
PARAMETERS = {
    "deepseek-v3": (671_026_404_352, "671B", "37B"),
    "deepseek-v3.2": (671_877_929_216, "671B", "37B"),
    "gemma-2-9b": (9_241_705_984, "9.24B", ""),
    "gemma-2-27b": (27_227_128_320, "27.2B", ""),
    "gemma-3-27b": (27_009_346_304, "27B", ""),
    "gemma-4-26b-a4b": (25_233_141_760, "25.2B", "3.8B"),
    "glm-5": (743_911_199_232, "744B", "40B"),
    "gpt-oss-20b": (20_914_757_184, "20.91B", "3.61B"),
    "gpt-oss-120b": (116_829_156_672, "116.83B", "5.13B"),
    "jamba-v0.1": (51_570_323_328, "52B", "12B"),
    "kimi-k2": (1_026_408_209_408, "1.0T", "32B"),
    "llama-2-7b": (6_738_415_616, "6.74B", ""),
    "llama-3-70b": (70_553_706_496, "70.6B", ""),
    "llama-3.1-8b": (8_030_261_248, "8.03B", ""),
    "llama-3.1-405b": (405_853_388_800, "406B", ""),
    "llama-3.2-1b": (1_235_814_400, "1.24B", ""),
    "llama-4-scout": (107_769_861_120, "109B", "17B"),
    "minimax-m2": (228_689_748_992, "230B", "10B"),
    "mistral-7b-v0.1": (7_241_732_096, "7.24B", ""),
    "mistral-7b-v0.3": (7_248_023_552, "7.25B", ""),
    "mixtral-8x7b": (46_702_792_704, "46.7B", "12.9B"),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, "31.6B", "3.2B"),
    "nemotron-h-56b": (56_324_350_464, "56B", ""),
    "phi-4": (14_659_507_200, "14.7B", ""),
    "qwen2.5-7b": (7_615_616_512, "7.61B", ""),
    "qwen2.5-72b": (72_706_203_648, "72.7B", ""),
    "qwen3-8b": (8_190_735_360, "8.2B", ""),
    "qwen3-32b": (32_762_123_264, "32.8B", ""),
    "qwen3-30b-a3b": (30_532_122_624, "30.5B", "3.3B"),
    "qwen3-235b-a22b": (235_093_634_560, "235B", "22B"),
    "qwen3-next-80b-a3b": (79_674_391_296, "80B", "3B"),
    "qwen3.5-27b": (26_895_998_464, "27B", ""),
    "qwen3.5-35b-a3b": (34_660_610_688, "35B", "3B"),
    "smollm2-135m": (134_515_008, "135M", ""),
}


def near(count, published, share):
    scale = {"M": 1e6, "B": 1e9, "T": 1e12}[published[-1]]
    digits = len(published[:-1].partition(".")[2])
    stated = float(published[:-1]) * scale
    return abs(count - stated) <= max(share * stated, 0.51 * scale / 10**digits)


def test_every_preset_has_the_published_number_of_parameters():
    assert PARAMETERS.keys() == PRESETS.keys()
    for name, (exact, published, active) in PARAMETERS.items():
        model = find_model(name)
        assert model.num_parameters == exact, name
        assert near(exact, published, 0.013), name
        if active:  # of the table of tokens and the head, cards count both, one or none
            table = next(part.num for part in model.weights if part.part == "embedding")
            counts = (model.num_active_parameters + num * table for num in (-1, 0, 1))
            assert any(near(count, active, 0.03) for count in counts), name


@pytest.mark.parametrize(("name", "gibibytes"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_weights_of_gpt_oss_are_the_published_size(name, gibibytes):
    assert find_model(name).weight_bytes() / GIB == pytest.approx(gibibytes, abs=0.05)


def test_fp8_checkpoints_have_linear_layers_of_a_byte():
    model = find_model("deepseek-v3")
    rest = 2 * 129_280 * 7168 + 58 * 256 * 7168  # embedding, head, routers
    assert model.weight_bytes() == pytest.approx(model.num_parameters + rest, rel=1e-4)
    assert model.weight_bytes("bf16") == 2 * model.num_parameters
    dense = find_model("llama-3.1-8b")
    rest = 2 * 128_256 * 4096 + (2 * 32 + 1) * 4096  # embedding, head, norms
    assert dense.weight_bytes("fp8") == dense.num_parameters + rest


TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
MOE = {**EXPERTS, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA2 = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4}
MAMBA1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
TRANSFORMERS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3_moe": MOE,
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 6},
    "gpt_oss": {"sliding_window": 8, **EXPERTS},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, **EXPERTS},
    "deepseek_v3": {"head_dim": None, "num_key_value_heads": 4, "first_k_dense_replace": 1, **MLA, **MOE},
    "qwen3_next": {**LINEAR, "shared_expert_intermediate_size": 16, **MOE},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "moe"], **MAMBA2, **MOE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, **MAMBA1, **EXPERTS},
}


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_parameters_are_those_of_transformers(model_type):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    fields = {name: value for name, value in (TINY | TRANSFORMERS[model_type]).items() if value is not None}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(model_type, **fields)
        module = transformers.AutoModelForCausalLM.from_config(config)
    ours = read_model(config.to_dict())
    assert ours.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert not ours.why_no_weights


# Formats and tensor parallelism


@pytest.mark.parametrize(
    ("kv_format", "num_bytes"),
    [
        ("fp32", 512),
        ("bf16", 256),
        ("fp8", 128),
        ("int8", 132),
        ("q8_0", 136),
        ("q5_1", 96),
        ("q4_0", 72),
        ("nvfp4", 72),
        ("mxfp4", 68),
    ],
)
def test_a_vector_of_128_takes_its_elements_and_scales(kv_format, num_bytes):
    assert FORMATS[kv_format].size(128) == num_bytes
    assert find_model("llama-3.1-8b").kv_bytes_per_token(kv_format) == 32 * 8 * 2 * num_bytes


def test_a_vector_is_rounded_up_to_whole_groups():
    assert FORMATS["q8_0"].size(33) == 68


@pytest.mark.parametrize(
    ("name", "tp", "num_bytes"),
    [
        ("llama-3-70b", 4, 327_680 // 4),
        ("llama-3-70b", 8, 327_680 // 8),
        ("llama-3-70b", 16, 327_680 // 8),  # 8 KV heads, each on two GPUs
        ("deepseek-v3", 8, 70_272),  # the latent is on all
        ("gpt-oss-20b", 2, 49_152 // 2),
    ],
)
def test_tensor_parallelism_splits_heads_and_repeats_the_rest(name, tp, num_bytes):
    assert find_model(name).kv_bytes_per_token("bf16", tp=tp) == num_bytes


def test_weights_are_split_but_for_norms_and_heads_that_are_too_few():
    model = find_model("llama-3.1-8b")
    norms, keys_and_values = (2 * 32 + 1) * 4096, 32 * 2 * 4096 * 1024
    rest = model.num_parameters - norms - keys_and_values
    assert model.weight_bytes(tp=4) == pytest.approx(2 * (norms + (keys_and_values + rest) / 4))
    assert model.weight_bytes(tp=16) == pytest.approx(2 * (norms + keys_and_values / 8 + rest / 16))


def test_a_state_is_split_by_its_heads():
    model = find_model("qwen3-next-80b-a3b")
    assert model.state_bytes() == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert model.state_bytes(tp=16) == model.state_bytes() / 16
    assert model.state_bytes(tp=32) == model.state_bytes(tp=16)


@given(presets, st.sampled_from(KV_FORMATS), st.integers(0, 5))
def test_more_gpus_hold_less_each_and_no_less_in_all(name, kv_format, power):
    model, tp = find_model(name), 2**power
    for size in (
        lambda tp: model.kv_bytes_per_token(kv_format, tp=tp),
        lambda tp: model.state_bytes(tp=tp),
        lambda tp: model.weight_bytes(tp=tp),
        lambda tp: model.request_bytes(5000, kv_format, tp=tp, block_size=16),
        lambda tp: float(model.read_bytes(7, tp=tp)),
    ):
        assert size(1) * (1 - 1e-9) <= size(tp) * tp
        assert size(2 * tp) <= size(tp)


@given(presets, st.integers(1, 5))
def test_what_can_be_split_is_halved_by_twice_the_gpus(name, power):
    model = find_model(name)
    tp = 2**power
    even = [part for part in model.weights if part.pieces == 0 or part.pieces % (2 * tp) == 0]
    split = Model(**{field: getattr(model, field) for field in Model.__dataclass_fields__} | {"weights": tuple(even)})
    assert split.weight_bytes(tp=2 * tp) == pytest.approx(split.weight_bytes(tp=tp) / 2)


@given(presets, st.sampled_from(KV_FORMATS), tokens, tokens, st.sampled_from([1, 16, 256]))
def test_a_longer_request_takes_more_and_never_more_than_its_parts(name, kv_format, first, second, block_size):
    model = find_model(name)

    def size(num):
        return model.request_bytes(num, kv_format, block_size=block_size) - model.state_bytes()

    assert 0 < size(first) <= size(first + second) <= size(first) + size(second)
    assert size(first) <= -(-first // block_size) * block_size * model.kv_bytes_per_token(kv_format)
    assert size(first) >= first * model.kv_bytes_per_token(kv_format, beyond_windows=True)


# Arithmetic


def pairs(layers, num_tokens):
    """By definition: each query attends to itself and what is before it, in its window or chunk."""
    total = 0
    for query in range(num_tokens):
        first = 0
        if layers.kind == "chunk":
            first = query - query % layers.attends
        elif layers.attends is not None:
            first = max(0, query + 1 - layers.attends)
        total += query + 1 - first
    return total


@given(
    st.sampled_from([("full", None), ("window", 1), ("window", 7), ("chunk", 5), ("latent", 4)]),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_attention_is_counted_pair_by_pair(shape, cached, new):
    kind, attends = shape
    layers = Layers(kind, 3, 1, (8, 8), attends=attends, prefill_flops=10, decode_flops=20)
    model = Model("made", 1, (layers,), (), "", (0, 0), "bf16", "fp32", {})
    assert float(model.prefill_flops(new, cached)[1]) == 3 * 10 * (pairs(layers, cached + new) - pairs(layers, cached))
    expected = new if attends is None else min(new, attends)
    assert float(model.decode_flops(new)[1]) == 3 * 20 * expected


def test_prefill_of_llama_takes_two_flops_a_parameter_and_four_an_element_of_attention():
    model = find_model("llama-3.1-8b")
    dense, attention = model.prefill_flops(1000)
    head = 128_256 * 4096
    assert float(dense) == 2 * ((model.num_parameters - 2 * head) * 1000 + head)
    assert float(attention) == 32 * 4 * 4096 * 1000 * 1001 / 2


@given(presets, tokens, tokens)
def test_prefill_in_two_parts_takes_as_much_as_at_once(name, first, second):
    model = find_model(name)
    head = 2 * sum(part.num_active for part in model.weights if part.part == "head")  # for each a logit
    parts = sum(float(sum(model.prefill_flops(*part))) for part in ((first, 0), (second, first)))
    assert parts - head == pytest.approx(float(sum(model.prefill_flops(first + second))), rel=1e-9)


def test_decode_multiplies_the_latent_and_prefill_whole_heads():
    (latent,) = find_model("deepseek-v3").layers
    assert latent.prefill_flops == 2 * 128 * (192 + 128)
    assert latent.decode_flops == 2 * 128 * (576 + 512)


@pytest.mark.parametrize(("num_tokens", "share"), [(1, 8 / 256), (2, 1 - (1 - 8 / 256) ** 2), (10**6, 1)])
def test_a_pass_reads_the_experts_that_its_tokens_use(num_tokens, share):
    experts = Weights("experts", 1000, 8)
    model = Model("made", 1, (), (experts,), "", (8, 256), "bf16", "fp32", {})
    assert float(model.read_bytes(num_tokens)) == pytest.approx(2000 * share)


def test_a_pass_reads_the_head_and_not_the_embedding():
    untied, tied = find_model("llama-3.1-8b"), find_model("llama-3.2-1b")
    assert float(untied.read_bytes(1)) == 2 * (untied.num_parameters - 128_256 * 4096)
    assert float(tied.read_bytes(1)) == 2 * tied.num_parameters == tied.weight_bytes()


def test_arrays_give_what_numbers_give():
    deployment = Deployment(find_model("gpt-oss-20b"), H100)
    new, cached = np.array([1, 100, 5000]), np.array([0, 300, 20_000])
    alone = [float(deployment.prefill_seconds(*lengths)) for lengths in zip(new, cached, strict=True)]
    assert deployment.prefill_seconds(new, cached).tolist() == alone


# Time


def test_prefill_is_bound_by_arithmetic_and_decode_by_memory():
    gpu = Gpu("made", 100 * GIB, flops=1e12, flops_fp8=2e12, bandwidth=1e9)
    deployment = Deployment(read_model(LLAMA), gpu, compute_efficiency=0.25, bandwidth_efficiency=0.5)
    model = deployment.model
    assert float(deployment.prefill_seconds(10_000)) == float(sum(model.prefill_flops(10_000))) / 0.25e12
    read = 2 * (model.num_parameters - 128_256 * 4096) + 3 * 2000 * 131_072
    assert float(deployment.decode_seconds(2000, 3)) == pytest.approx(read / 0.5e9)
    assert Deployment(model, gpu, weight_format="fp8").dense_flops == 2e12
    assert Deployment(model, gpu, weight_format="int4").dense_flops == 1e12


@given(deployed(), tokens, tokens, st.integers(1, 200))
def test_time_grows_with_what_is_asked_and_shrinks_with_what_is_cached(deployment, some, more, batch):
    def prefill(new, cached=0):
        return float(deployment.prefill_seconds(new, cached))

    assert prefill(some) <= prefill(some + more)
    assert prefill(some, more) <= prefill(some + more) * (1 + 1e-12)
    one, all_of_them = (float(deployment.decode_seconds(some, num)) for num in (1, batch))
    assert one <= all_of_them <= batch * one * (1 + 1e-12)
    assert one <= float(deployment.decode_seconds(some + more, 1))


@given(presets, st.integers(0, 3), tokens)
def test_more_gpus_are_never_slower(name, power, num_tokens):
    model = find_model(name)
    sizes = [tp for tp in (2**power, 2 ** (power + 1)) if fits_heads(model, tp)]
    times = [
        (float(one.prefill_seconds(num_tokens)), float(one.decode_seconds(num_tokens, 4)))
        for one in (Deployment(model, H100, tp=tp) for tp in sizes)
    ]
    assert times == sorted(times, reverse=True)


def test_an_estimate_adds_a_pass_for_each_token_of_output():
    deployment = Deployment(find_model("llama-3.1-8b"), H100)
    whole, behind = (estimate(deployment, 8000, 100, cached=cached, batch=8) for cached in (0, 6000))
    assert whole.total_s == whole.ttft_s + 100 * whole.itl_s
    assert whole.itl_s == behind.itl_s == float(deployment.decode_seconds(8050, 8))
    assert behind.ttft_s == float(deployment.prefill_seconds(2000, 6000)) < whole.ttft_s / 3


# What fits


def test_a_pool_is_what_weights_and_reserve_leave():
    gpu = Gpu("made", 40 * GIB, flops=1e15, flops_fp8=1e15, bandwidth=1e12)
    deployment = Deployment(find_model("llama-3.1-8b"), gpu, utilization=0.75, reserve=GIB, block_size=16)
    pool = 29 * GIB - 2 * 8_030_261_248
    assert deployment.pool_bytes == pool
    assert deployment.num_blocks == pool // (16 * 131_072)
    assert deployment.num_requests(8192) == pool // (8192 * 131_072)
    assert deployment.num_requests(8193) == pool // (8208 * 131_072)


def test_where_weights_do_not_fit_nothing_does():
    deployment = Deployment(find_model("llama-3-70b"), H100)
    assert deployment.pool_bytes < 0
    assert (deployment.num_blocks, deployment.num_requests(1)) == (0, 0)
    fitting = [one.tp for one in deployments(find_model("llama-3-70b"), H100) if one.num_requests(8192)]
    assert fitting == [2, 4, 8, 16, 32, 64]


@given(deployed(), tokens, st.sampled_from([16, 64, 512]))
def test_as_many_requests_run_as_fit(deployment, num_tokens, block_size):
    num = deployment.num_requests(num_tokens)
    each = deployment.request_bytes(num_tokens)
    assert num * each <= max(0, deployment.pool_bytes) < (num + 1) * each
    assert deployment.num_requests(num_tokens + 1) <= num


@pytest.mark.parametrize(("name", "tp"), [("qwen2.5-7b", 8), ("llama-3.1-8b", 3), ("phi-4", 4), ("llama-3.1-8b", 64)])
def test_gpus_that_cannot_split_the_heads_are_refused(name, tp):
    with pytest.raises(ValueError, match=rf"tp must divide the \d+ attention heads.*got {tp}"):
        Deployment(find_model(name), H100, tp=tp)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_format": "fp7"}, "kv_format must be one of fp32, .* got 'fp7'"),
        ({"kv_format": "int4"}, "kv_format must be"),
        ({"weight_format": "q8_0"}, "weight_format must be one of fp32, .* got 'q8_0'"),
        ({"utilization": 0}, r"utilization must be in \(0, 1\], got 0"),
        ({"compute_efficiency": 1.1}, r"compute_efficiency must be in \(0, 1\], got 1.1"),
        ({"bandwidth_efficiency": -1}, "bandwidth_efficiency must be"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_bad_assumptions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Deployment(find_model("llama-3.1-8b"), H100, **arguments)


def test_every_assumption_is_told():
    deployment = Deployment(find_model("gpt-oss-20b"), H100, tp=16, utilization=0.8, reserve=3 * GIB)
    told = "\n".join(assumptions(deployment))
    for words in (
        "79.6 GiB, 3350 GB/s, 989 TFLOP/s",
        "80% of the memory",
        "3 GiB",
        "50% of the peak",
        "80% of the band",
    ):
        assert words in told
    for words in ("experts are chosen evenly", "fewer KV heads than GPUs", "left its window", "not counted"):
        assert words in told
    assert "hit needs the state" in "\n".join(assumptions(Deployment(find_model("qwen3.5-27b"), H100)))
    assert "whole latent" in "\n".join(assumptions(Deployment(find_model("deepseek-v3"), GPUS["b200"], tp=8)))


# GPUs


def test_gpus_are_found_by_name_or_made_of_three_numbers():
    assert find_gpu(" H100") is GPUS["h100"]
    assert find_gpu("24,181,864") == Gpu("GPU of 24 GiB", 24 * GIB, 181e12, 181e12, 864e9)


@pytest.mark.parametrize("text", ["h101", "", "24,181", "24,181,864,1", "24,-1,864", "nan,1,1", "1,1,inf", "a,b,c"])
def test_unknown_gpus_are_refused(text):
    with pytest.raises(ValueError, match="GiB"):
        find_gpu(text)


# Workloads


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(num_requests=300)


@pytest.mark.parametrize("capacity", [1000, None])
def test_a_trace_is_cached_as_its_replay_hits(trace, capacity):
    workload = trace_workload(trace)
    assert workload.prompts.sum() == sum(request.num_prompt_tokens for request in trace.requests)
    hits = replay(trace, capacity).hit_tokens
    assert int(workload.cached(capacity).sum()) == pytest.approx(hits, rel=0.01)
    assert (workload.cached(capacity) < workload.prompts).all()
    assert workload.cached(0).sum() == 0
    assert (workload.cached(workload.most_blocks) == workload.cached(None)).all()


def test_of_a_prompt_that_came_before_a_token_is_prefilled():
    requests = [IdRequest(float(second), 64, 1, array("q", [0, 4])) for second in range(2)]
    workload = trace_workload(IdTrace("made", requests, block_size=16, num_blocks=4))
    assert workload.cached(None).tolist() == [0, 63]
    assert (workload.rate, workload.mean_context, workload.most_blocks) == (1, 65, 4)


def test_a_larger_cache_saves_more_and_never_costs_time(trace):
    workload = trace_workload(trace)
    deployment = Deployment(find_model("llama-3.1-8b"), H100)
    rows = [serve(deployment, workload, capacity, prices=Prices(3, 0.3, 15)) for capacity in (0, 100, 1000, None)]
    assert rows[0].hit_tokens == rows[0].saved_flops == 0
    for smaller, larger in pairwise(rows):
        assert smaller.hit_tokens < larger.hit_tokens
        assert smaller.saved_flops < larger.saved_flops
        assert smaller.ttft_s > larger.ttft_s
        assert smaller.bill > larger.bill
        assert larger.saved_flops + larger.prefill_flops == pytest.approx(rows[0].prefill_flops)


def test_one_request_leaves_a_token_to_prefill():
    assert one_request(100, 10, cached=100).cached(None).tolist() == [99]
    assert one_request(100, 10, cached=60).without_cache().cached(None).tolist() == [0]


def made_workload(steps, *, most=100, block_size=1024):
    """Ten requests, of each of which a cache of more blocks holds more."""

    def cached(capacity):
        share = 1.0 if capacity is None or capacity >= most else capacity // steps * steps / most
        return np.full(10, share * 9000)

    return Workload(np.full(10, 10_000.0), np.full(10, 50.0), cached, block_size, most)


@settings(max_examples=25)
@given(st.integers(1, 40), st.floats(0.05, 0.5), st.floats(0.1, 40), st.sampled_from([1, 2]))
def test_the_fewest_gpus_and_the_smallest_cache_are_found(steps, ttft, rate, tp):
    workload = made_workload(steps)
    gpu = Gpu("small", 24 * GIB, flops=1e15, flops_fp8=1e15, bandwidth=2e12)
    deployment = Deployment(find_model("llama-3.1-8b"), gpu, tp=tp, block_size=16)
    target = Target(ttft, rate)
    room = deployment.num_blocks * 16 // 1024

    def first(sizes, is_enough):
        return next((size for size in sizes if is_enough(size)), None)

    enough = first(range(1, 60), lambda num: target.is_met(deployment, workload, num * room, num))
    found = choose([deployment], workload, target)
    assert (found.num_replicas if found else None) == enough
    if found:
        smallest = first(range(101), lambda size: target.is_met(deployment, workload, size, enough))
        assert found.num_blocks == smallest
        assert found.busy <= target.max_busy
        assert found.ttft_s <= ttft
        assert found.num_gpus == tp * enough


def test_the_candidate_with_the_fewest_gpus_is_chosen():
    workload = one_request(8000, 200)
    fits = [one for one in deployments(find_model("llama-3.1-8b"), H100) if one.num_requests(8200)]
    assert choose(fits, workload, Target(ttft_s=0.3)).deployment.tp == 1
    assert choose(fits, workload, Target(ttft_s=0.1)).deployment.tp == 4
    assert choose(fits, workload, Target(ttft_s=0.0001)) is None
    assert choose([], workload, Target(ttft_s=1)) is None


@given(st.integers(1, 60), st.sampled_from([0.6, 0.7, 0.8, 0.9]))
def test_a_rate_that_fills_its_gpus_to_the_last_bit_is_met(num, max_busy):
    deployment, workload = Deployment(find_model("llama-3.1-8b"), H100), one_request(8000, 200)
    each = workload.busy_seconds(deployment, None, workload.batch(deployment))
    found = choose([deployment], workload, Target(rate=max_busy * num / each, max_busy=max_busy))
    assert found.num_replicas in (num, num + 1)  # as rounding has it
    assert found.busy <= max_busy


def test_no_cache_is_enough_where_even_all_hits_are_too_slow():
    workload, deployment = made_workload(1), Deployment(find_model("llama-3.1-8b"), H100)
    assert smallest_cache(deployment, workload, Target(ttft_s=1e-5)) is None
    assert smallest_cache(deployment, workload, Target(ttft_s=10)) == 0
    blocks = smallest_cache(deployment, workload, Target(ttft_s=0.1))
    ttft = [float(workload.ttft(deployment, size).mean()) for size in (blocks - 1, blocks)]
    assert ttft[0] > 0.1 >= ttft[1]


def test_busy_time_is_prefill_and_a_share_of_each_pass():
    deployment = Deployment(find_model("llama-3.1-8b"), H100)
    workload = one_request(8000, 200)
    assert workload.batch(deployment, most=8) == 8
    expected = float(deployment.prefill_seconds(8000)) + 200 * float(deployment.decode_seconds(8100, 8)) / 8
    assert workload.busy_seconds(deployment, None, 8) == pytest.approx(expected)
    target = Target(rate=2, max_batch=8)
    assert target.busy(deployment, workload, None, 4) == pytest.approx(expected / 2)


def test_a_bill_counts_new_cached_and_output_tokens():
    prices = Prices(input=3, cached=0.3, output=15)
    assert prices.bill(1_000_000, 0, 100_000) == 3 + 1.5
    assert prices.bill(1_000_000, 600_000, 100_000) == pytest.approx(1.2 + 0.18 + 1.5)


# Configs


def changed(**fields):
    return {name: value for name, value in (LLAMA | fields).items() if value is not None}


def layers_of(**fields):
    return {layers.kind: layers for layers in read_model(changed(**fields)).layers}


def test_presets_are_found_under_the_names_that_people_use():
    for name in ("meta-llama/Meta-Llama-3.1-8B-Instruct", "LLAMA-3.1-8B", "llama-3-8b", "llama_3.1_8b"):
        assert find_model(name).name == "llama-3.1-8b"
    assert find_model("deepseek-ai/DeepSeek-R1").name == "deepseek-v3"
    with pytest.raises(ValueError, match=r"'llama-3.1-9b' is no preset; near: llama-3.1-8b"):
        find_model("llama-3.1-9b")
    with pytest.raises(ValueError, match="known: deepseek-v3, "):
        find_model("xyzzy")


def test_a_config_inside_a_multi_modal_one_is_read():
    inner = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    model = read_model({"model_type": "llava", "torch_dtype": "float16", "vision_config": LLAMA, "text_config": inner})
    assert model.layers == read_model(LLAMA).layers
    assert model.num_parameters == 8_030_261_248
    assert model.dtype == "fp16"
    deep = read_model({"thinker_config": {"text_config": LLAMA}})
    assert deep.layers == model.layers
    with pytest.raises(ConfigError, match=r"^a.json: text_config.num_hidden_layers: missing$"):
        read_model({"text_config": changed(num_hidden_layers=None)}, "a.json")


def test_layers_are_those_of_layer_types():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = layers_of(num_hidden_layers=3, layer_types=types, sliding_window=100)
    assert [(kind, one.num, one.keeps) for kind, one in layers.items()] == [("window", 2, 100), ("full", 1, None)]
    assert layers_of(num_hidden_layers=None, layer_types=types, sliding_window=100) == layers


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"full": 32}),
        ({"model_type": "mistral", "sliding_window": 4096}, {"window": 32}),
        ({"model_type": "mistral", "sliding_window": None}, {"full": 32}),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 20},
            {"full": 32},
        ),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20},
            {"full": 20, "window": 12},
        ),
        ({"model_type": "gemma2", "sliding_window": 4096, "head_dim": 128}, {"window": 16, "full": 16}),
        ({"model_type": "gemma3_text", "sliding_window": 512, "head_dim": 128}, {"window": 27, "full": 5}),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, {"window": 24, "full": 8}),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128}, {"chunk": 24, "full": 8}),
    ],
)
def test_windows_are_found_where_no_list_names_them(fields, expected):
    assert {kind: layers.num for kind, layers in layers_of(**fields).items()} == expected


def test_head_dim_is_stated_or_hidden_over_heads():
    assert layers_of()["full"].vectors == (128, 128)
    assert layers_of(head_dim=64)["full"].vectors == (64, 64)
    assert layers_of(head_dim=192, v_head_dim=128)["full"].vectors == (192, 128)


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({}, 32),
        ({"mlp_only_layers": [0, 5]}, 30),
        ({"first_k_dense_replace": 3}, 29),
        ({"decoder_sparse_step": 5}, 6),
        ({"expert_layer_period": 4, "expert_layer_offset": 1}, 8),
        ({"moe_layers": [1, 2, 3]}, 3),
        ({"moe_layers": [[]]}, 0),
        ({"mlp_layer_types": ["dense"] * 4 + ["sparse"] * 28}, 28),
    ],
)
def test_experts_are_in_the_layers_that_the_config_says(fields, num):
    model = read_model(changed(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=100, **fields))
    experts = sum(part.num for part in model.weights if part.part == "experts")
    assert experts == num * 4 * 3 * 4096 * 100
    assert sum(part.num for part in model.weights if part.part == "mlp") == (32 - num) * 3 * 4096 * 14_336


def test_heads_are_shared_only_where_the_config_says_so():
    assert layers_of(num_key_value_heads=None)["full"].num_kv_heads == 32
    with pytest.raises(ConfigError, match="num_key_value_heads: missing"):
        read_model(changed(model_type="mistral", num_key_value_heads=None))


def test_layers_that_read_the_kv_of_others_keep_none():
    assert layers_of(num_kv_shared_layers=12)["full"].num == 20


def test_layers_of_a_saved_gemma_4_have_the_heads_of_their_kind():
    types = ["sliding_attention", "full_attention"]
    own = {"1": {"head_dim": 512, "num_key_value_heads": 2}}
    fields = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 64, "head_dim": 256}
    layers = layers_of(**fields, per_layer_config=own)
    assert [(one.num_kv_heads, one.vectors) for one in layers.values()] == [(8, (256, 256)), (2, (512, 512))]
    with pytest.raises(ConfigError, match="per_layer_config: a layout of KV that is not known here"):
        layers_of(num_hidden_layers=2, per_layer_config=own)


def test_a_hybrid_keeps_kv_where_it_attends_and_a_state_elsewhere():
    model = find_model("nemotron-3-nano-30b-a3b")
    assert {layers.kind: layers.num for layers in model.layers} == {"mamba": 23, "full": 6}
    assert model.kv_bytes_per_token("bf16") == 6 * 2 * 2 * 128 * 2
    assert model.state_bytes() == 23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_that_kv_needs_is_named(name):
    with pytest.raises(ConfigError, match=f"^config.json: {name}: missing$"):
        read_model(changed(**{name: None}), "config.json")


@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size"])
def test_without_a_field_that_only_weights_need_kv_is_known(name):
    model = read_model(changed(**{name: None}), "config.json")
    assert model.kv_bytes_per_token("bf16") == 131_072
    assert model.weights == ()
    assert model.why_no_weights == f"config.json: {name}: missing"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 0}, r"num_hidden_layers: must be an int in \[1, 4096\], got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be"),
        ({"num_attention_heads": "32"}, r"num_attention_heads: must be an int in \[1, 2147483648\], got '32'"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads: must be an int"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: must divide the 32 attention heads, got 5"),
        ({"hidden_size": 4095}, "head_dim: missing, and 32 heads do not divide hidden_size 4095"),
        ({"vocab_size": True}, "vocab_size: must be an int"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 layers, but num_hidden_layers is 32"),
        ({"layer_types": ["full_attention", 7] * 16}, r"layer_types\[1\]: must be one of attention, .* got 7"),
        ({"layer_types": "full"}, "layer_types: must be a list, got 'full'"),
        ({"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern: must be of M, "),
        ({"hybrid_override_pattern": "---"}, "num_hidden_layers: no layer keeps anything of a sequence"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim: missing"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, r"num_experts_per_tok: must be an int in \[1, 8\], got 9"),
        ({"num_kv_shared_layers": 33}, r"num_kv_shared_layers: must be an int in \[0, 32\]"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: only models of a decoder alone"),
        ({"compress_ratios": [4]}, "compress_ratios: a layout of KV that is not known here"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config: the format of weights is not known"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_bound(fields, message):
    with pytest.raises(ConfigError, match=f"^a/config.json: {message}"):
        read_model(changed(**fields), "a/config.json")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
    ],
)
def test_quantised_weights_are_recognised(quantization, expected):
    model = read_model(changed(quantization_config=quantization))
    assert model.format_of("mlp") == expected
    assert model.format_of("attention", "bf16") == "bf16"
    assert (model.format_of("head"), model.format_of("embedding"), model.format_of("small")) == ("bf16",) * 3


def test_layers_left_out_of_quantisation_stay_as_they_are():
    model = find_model("gpt-oss-20b")
    assert (model.format_of("experts"), model.format_of("attention")) == ("mxfp4", "bf16")


def test_a_model_type_that_is_not_known_is_told():
    assert read_model(LLAMA).notes == ()
    assert read_model(changed(model_type="nova")).notes == (
        "model_type 'nova' is not known: what its fields suggest is counted",
    )
    assert "the config names no dtype that is known: bf16" in read_model(changed(torch_dtype=None)).notes


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    for path in (folder, folder / "config.json"):
        model = load_model(path)
        assert (model.name, model.num_parameters) == ("my-model", 8_030_261_248)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r":1: not JSON: .* \(column 2\)"),
        (b"[1]", r": must be a JSON object, got \[1\]"),
        (b"\xff", ": not UTF-8 text: byte 0"),
        (b'{"a": ' + b"9" * 5000 + b"}", ": not JSON that can be read"),
        (b"[" * 100_000, ": not JSON that can be read"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path}{message}"):
        load_model(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: No such file or directory$"):
        load_model(tmp_path)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**40)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["full_attention"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["0", "weights", "quant_method"]), inner)
    ),
    max_leaves=6,
)
EXTRA = ["layer_types", "per_layer_config", "quantization_config", "text_config", "mlp_layer_types", "indexer_types"]
EXTRA += ["moe_layers", "mlp_only_layers", "layers_block_type", "model_type", "dtype", "modules_to_not_convert"]


@given(st.data(), presets)
def test_no_config_gives_anything_but_a_model_or_a_line_that_names_its_field(data, name):
    fields = dict(PRESETS[name])
    for field in data.draw(st.lists(st.sampled_from([*fields, *EXTRA]), min_size=1, max_size=2)):
        fields[field] = data.draw(JUNK)
    if data.draw(st.booleans()):
        fields["quantization_config"] = {
            key: data.draw(JUNK) for key in ("config_groups", "ignore", "bits", "quant_method")
        }
    try:
        model = read_model(fields, "x.json")
    except ConfigError as error:
        assert str(error).startswith("x.json: ")
        assert "\n" not in str(error)
        return
    assert model.request_bytes(100, "bf16") > 0
    assert math.isfinite(model.weight_bytes())
    assert model.weights or model.why_no_weights.startswith("x.json: ")
