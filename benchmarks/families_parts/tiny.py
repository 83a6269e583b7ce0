"""Tiny random models of every decoder family of the installed transformers, made from their configurations alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WIDTH = 96, 32

_SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "embedding_size", "attention_hidden_size", "lru_width"], WIDTH
    ),
    **dict.fromkeys(["word_embed_proj_dim", "embedding_dim", "emb_dim", "dim_model"], WIDTH),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner"], 48),
    **dict.fromkeys(["d_inner", "feed_forward_size", "dff", "shared_intermediate_size"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"], 2),
    "encoder_layers": 1,
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "mamba_n_heads", "linear_num_value_heads", "linear_num_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "linear_num_key_heads"], 2),
    **dict.fromkeys(["head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "d_kv"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "mamba_d_head"], 16),
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input"], 8),
    **dict.fromkeys(["mamba_n_groups", "n_groups", "n_group", "topk_group", "n_shared_experts"], 1),
    **dict.fromkeys(["num_shared_experts", "first_k_dense_replace"], 1),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "time_step_rank"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "expand"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "router_hidden_size"], 16),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "dim_ff"], 16),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "sliding_window"], 128
    ),
    "is_decoder": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_MLA = {"head_dim": 8, "num_key_value_heads": 4}
_WIDE = {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 16}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 48, "activation_sparsity_pattern": [0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 1},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attention_head_size": 8},
    "zamba": {"mamba_dt_rank": 4, "layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, **_WIDE},
    "zamba2": {
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_hidden_layers": 4,
        **_WIDE,
    },
    "zaya": {"num_experts_per_tok": 1},
}
_SKIPPED = {
    "prophetnet": ["num_hidden_layers"],
    "xlnet": ["max_position_embeddings"],
    "falcon": ["head_dim"],
    "cohere_compass_text": ["layer_types"],
    "zamba2": ["layer_types"],
}
_SUB = {"mpt", "dbrx"}  # their parts are of one decoder; all others that have parts read more than text


def families() -> list[str]:
    """Model types with a causal language model of text."""
    return sorted(
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind in _SUB or not getattr(CONFIG_MAPPING[kind], "sub_configs", None)
    )


def tiny_config(kind: str, **options: Any) -> Any:
    """A configuration of two layers (more where there are more kinds of them) and 32 hidden units."""
    config_class: Any = CONFIG_MAPPING[kind]
    default = config_class()
    sizes = {name: value for name, value in _SIZES.items() if _is_number(default, name)}
    if hasattr(default, "qk_rope_head_dim"):
        sizes |= {name: value for name, value in _MLA.items() if name in sizes}
    kinds = _kinds_of_layers(default)
    if kinds:
        settable = not any(_is_derived(config_class, name) for name in ("layer_types", "layers_block_type"))
        sizes["num_hidden_layers"] = max(2, len(kinds))
        if settable:
            sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
    for name in _SKIPPED.get(kind, []):
        sizes.pop(name, None)
    return config_class(**sizes | _OWN.get(kind, {}) | options)


def tiny_of(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A random model in eval mode whose logits are far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **options))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                outer = any(part in name for part in ("embed", "wte", "wpe", "lm_head"))
                nn.init.normal_(parameter, std=0.6 if outer else 0.2)
    return model.to(dtype).eval()


def _is_derived(config_class: type, name: str) -> bool:
    attribute = getattr(config_class, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _is_number(config: Any, name: str) -> bool:
    if _is_derived(type(config), name):
        return False
    try:
        value = getattr(config, name)
    except Exception:  # some have none, others one per layer
        return False
    return not isinstance(value, (list, tuple, dict))


def _kinds_of_layers(config: Any) -> list[str]:
    kinds: Iterable[str] | None
    try:
        kinds = config.layer_types
    except Exception:
        kinds = None
    return list(dict.fromkeys(kinds or []))
