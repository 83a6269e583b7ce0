"""What several test files share: fixed tolerances, tiny models of four architectures, batches by hand."""

import gc
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from pbrl_lightning.agents.loading import tiny_model, tiny_tokenizer
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TokenBatch

VOCABULARY = 259
ARCHITECTURES = ("llama", "gpt2", "gemma2", "granite")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_close(actual: Tensor | float, expected: Tensor | float, tolerance: float | None = None) -> None:
    """Equal within ``tolerance * (1 + |expected|)``; the default tolerance is fixed per dtype. NaN is never equal."""
    actual = torch.as_tensor(actual).detach()
    expected = torch.as_tensor(expected).detach()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    limit = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    assert limit <= 0.1, f"a tolerance of {limit} checks nothing"
    actual, expected = actual.double(), expected.double()
    gap = (actual - expected).abs() / (1 + expected.abs())
    assert bool((gap <= limit).all()), f"largest gap {gap.max().item():.3e} > {limit:.0e}\n{actual}\n{expected}"


def tiny(architecture: str, dtype: torch.dtype = torch.float64, seed: int = 0, **options: object) -> PreTrainedModel:
    """A random model in eval mode with logits that are far from uniform.

    ``gpt2`` has absolute positions and tied embeddings, ``gemma2`` soft-capped attention and logits and a sliding
    window, ``granite`` scaled logits, embeddings and residuals.
    """
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    llama_like = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "llama":
            model = tiny_model(seed)
        elif architecture == "gpt2":
            gpt2_sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
            model = GPT2LMHeadModel(GPT2Config(**{**sizes, **gpt2_sizes} | options))
        elif architecture == "gemma2":
            # Transformers' eager attention, the only one Gemma2 has, turns rows that see padding alone into NaN in
            # float64 (its softmax is float32): there the window must reach back to the text.
            window = 128 if dtype == torch.float64 else 8
            capped = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "sliding_window": window}
            capped["head_dim"] = 8
            model = Gemma2ForCausalLM(Gemma2Config(**{**sizes, **llama_like, **capped} | options))
        elif architecture == "granite":
            scaled = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
            model = GraniteForCausalLM(GraniteConfig(**{**sizes, **llama_like, **scaled} | options))
        else:
            raise ValueError(architecture)
        # Default initialisation gives almost uniform logits, on which most mistakes would not show.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.6 if "embed" in name or "wte" in name or "lm_head" in name else 0.2)
    return model.to(dtype).eval()


def make_batch(
    prompts: list[list[int]], responses: list[list[int]], pad_id: int = 2, extra_padding: int = 0
) -> TokenBatch:
    """Rows of prompt + response, padded on the right; masks come from the lengths alone."""
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    width = max(map(len, rows)) + extra_padding
    ids = torch.full((len(rows), width), pad_id)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    response_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        attention[index, : len(row)] = True
        response_mask[index, len(prompts[index]) : len(row)] = True
    return TokenBatch(ids, attention, response_mask)


def save_model(model: PreTrainedModel, directory: Path, tokenizer: object = None) -> str:
    """A model directory with a tokenizer (the byte tokenizer unless another is given)."""
    model.save_pretrained(directory)
    (tokenizer or tiny_tokenizer()).save_pretrained(directory)
    return str(directory)


def count_layer_forwards(model: nn.Module) -> list[int]:
    """A list that grows by one at every forward of a decoder layer, recomputations included."""
    calls: list[int] = []
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        # Within the checkpointed function, where a recomputation passes too.
        next(child for child in layer.modules() if "norm" in type(child).__name__.lower()).register_forward_hook(
            lambda *_: calls.append(1)
        )
    return calls


def live_tensor_bytes() -> int:
    """Bytes of all tensors that Python objects hold, each storage once."""
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def pad_ids(team: AgentTeam) -> list[int]:
    """What fills up the rows of a team's pairs, per agent."""
    return [team.tokenizer(agent).pad_token_id or 0 for agent in range(team.num_agents)]
