"""Tiny random decoders of many families, whose replies depend on every token of the prompt."""

from typing import Any

import torch
import transformers

VOCAB = 211
PAD = 0

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.4,  # large, so that attention decides and not the last token alone
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOW = 24
_TYPE = "rope_type" if transformers.__version__ >= "5" else "type"
_LONGROPE = {_TYPE: "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# family -> (model class, what its config has beside the common)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": _WINDOW}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
        },
    ),
    "phi3": ("Phi3ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "head_dim": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **_MOE,
        },
    ),
    "phi3_longrope": (
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 64, "rope_scaling": _LONGROPE, "rope_parameters": _LONGROPE},
    ),
    "llama_dynamic": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 64, "rope_scaling": _DYNAMIC, "rope_parameters": _DYNAMIC},
    ),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": _WINDOW}),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": _WINDOW,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", {"num_hidden_layers": 4, "num_experts": 4, **_MOE}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]}),
    "jamba": ("JambaForCausalLM", {"num_hidden_layers": 8, "num_experts": 2, "use_mamba_kernels": False}),
    "mamba2": ("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}),
    "moshi": ("MoshiForCausalLM", {"ffn_dim": 48, "sliding_window": _WINDOW}),
    "bert": ("BertLMHeadModel", {"is_decoder": False}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}


def make(family: str, *, seed: int = 0, **config: Any) -> Any:
    """A random model in eval mode, the same for the same arguments."""
    name, options = MODELS[family]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**_COMMON | options | config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at one or zero is not random otherwise
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.pad_token_id = PAD
    return model


def prompt(num_tokens: int, seed: int) -> torch.Tensor:
    """Random token ids, (num_tokens,)."""
    return torch.randint(1, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded input_ids and attention_mask, (rows, longest)."""
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=PAD) for row in rows])
    return ids, torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
