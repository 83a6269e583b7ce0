"""Adapters beyond LoRA on linear layers (embeddings, DoRA, whole modules, rows), and families PEFT does not know."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.families_parts.tiny import tiny_of
from helpers import assert_close, make_batch
from pbrl_lightning import AgentTeam, HistoryComparator, LoraOptions
from pbrl_lightning.agents.adapters import adapter_values, read_adapter
from pbrl_lightning.agents.loading import resolve_source, tiny_tokenizer
from pbrl_lightning.agents.reference import ReferencePolicies
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.comparators.base import CollectionPhase
from pbrl_lightning.comparators.history import history_name
from pbrl_lightning.utils.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BATCH = make_batch([[3, 4, 5, 6], [7, 5]], [[7, 8], [9]])
KINDS = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding alone": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "DoRA": {"use_dora": True},
    "DoRA on the embedding": {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
    "whole modules": {"modules_to_save": ["lm_head", "norm"]},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "rows of the embedding": {"trainable_token_indices": [5, 6, 7]},
    "biases of LoRA": {"lora_bias": True},
    "parameters": {"target_parameters": ["q_proj.weight"], "target_modules": ["v_proj"]},
}


def saved(directory, **options):
    """Two random adapters of a kind, as PEFT saves them."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(resolve_source("builtin:tiny").base)
        model = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options))
        model.save_pretrained(directory / f"adapter_{seed}")
        found.append(str(directory / f"adapter_{seed}"))
    return found


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        *((kind, torch.bfloat16) for kind in ("embedding", "whole modules", "rows of the embedding")),
    ],
)
def test_fault_B113_history_reads_every_kind_of_adapter(tmp_path, kind, dtype):
    team = AgentTeam(saved(tmp_path, **KINDS[kind])).load().to(dtype)
    team.save(tmp_path / history_name(1))
    expected = [team.response_logps(agent, BATCH).detach() for agent in range(2)]
    before = [{name: p.detach().clone() for name, p in team.agent_parameters(agent).items()} for agent in range(2)]
    with torch.no_grad():
        for agent in range(2):
            for parameter in team.agent_parameters(agent).values():
                parameter.add_(0.5)
    moved = [team.response_logps(agent, BATCH).detach() for agent in range(2)]
    phase = CollectionPhase(round_number=2, history=tmp_path)
    with HistoryComparator(1).session(team, phase) as speaker:
        assert speaker is team
        for agent in range(2):
            assert all(torch.equal(p, before[agent][name]) for name, p in team.agent_parameters(agent).items())
            assert torch.equal(team.response_logps(agent, BATCH).detach(), expected[agent])
    for agent in range(2):
        assert torch.equal(team.response_logps(agent, BATCH).detach(), moved[agent])
        assert not torch.equal(moved[agent], expected[agent])


def test_an_adapter_file_without_a_weight_is_named(tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=1, lora=LoraOptions(r=2)).load()
    team.save(tmp_path)
    file = tmp_path / "agent_0" / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != gone}, file)
    with pytest.raises(ConfigurationError, match=rf"has no {gone} \(1 of 8 weights are missing\)"):
        read_adapter(tmp_path / "agent_0", team.backbone(0), "agent_0", team.agent_parameters(0))


def test_values_of_an_adapter_are_given_back_after_an_error(tmp_path):
    team = AgentTeam(saved(tmp_path, **KINDS["whole modules"])).load()
    parameters = team.agent_parameters(0)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    with pytest.raises(KeyError), adapter_values(parameters, {name: p + 1 for name, p in before.items()}):
        raise KeyError
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", ["embedding alone", "DoRA", "rows of the embedding"])
def test_a_saved_adapter_is_its_own_reference(tmp_path, kind):
    """An adapter on the embedding alone was taken for a new one, and the bare backbone for its reference."""
    team = AgentTeam(saved(tmp_path, **KINDS[kind])).load()
    reference, expected = ReferencePolicies(team, None), team.response_logps(0, BATCH).detach()
    assert not torch.equal(team.score_responses(0, BATCH, adapted=False).sums.detach(), expected)
    with torch.no_grad():
        for parameter in team.agent_parameters(0).values():
            parameter.add_(0.3)
    assert_close(reference.score_responses(0, BATCH).sums, expected)


def test_a_new_adapter_on_the_embedding_needs_no_copy_as_its_reference():
    lora = LoraOptions(r=2, target_modules=["embed_tokens", "q_proj"])
    reference = ReferencePolicies(AgentTeam("builtin:tiny", num_agents=2, lora=lora), None)
    assert reference.state_dict() == [None, None]


@pytest.mark.parametrize("family", ["phi3", "olmo2", "smollm3", "qwen3_moe"])
def test_fault_B113_all_linear_layers_where_peft_names_none(family):
    team = AgentTeam(tiny_of(family), num_agents=2, tokenizers=tiny_tokenizer(letters=True), lora=LoraOptions(r=2))
    adapted = {name.split(".lora_")[0].rsplit(".")[-1] for name in team.agent_parameters(0)}
    assert {"o_proj"} < adapted
    assert "lm_head" not in adapted
    team.response_logps(1, BATCH).sum().backward()
    assert all(p.grad is not None for p in team.agent_parameters(1).values() if p.ndim == 2)
    items, sampling = [{"prompt": "ab"}], SamplingConfig(max_new_tokens=3)
    sample = team.sample(items, [0], num_candidates=2, sampling=sampling, seed=0, stream="actors")[0]
    assert len(sample.responses) == 2


def test_target_modules_that_a_model_has_not_are_refused_with_those_it_has():
    team = AgentTeam("builtin:tiny", num_agents=2, lora=LoraOptions(target_modules=["qkv"]))
    with pytest.raises(ConfigurationError, match=r"`target_modules` \['qkv'\] does not fit LlamaForCausalLM .*q_proj"):
        team.load()


def test_adapters_with_biases_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigurationError, match=r"adapter_1' cannot be loaded: .*only 1 adapter"):
        AgentTeam(saved(tmp_path, bias="lora_only")).load()


def test_target_modules_in_a_word(tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=1, lora=LoraOptions(r=2, target_modules="all-linear")).load()
    team.save(tmp_path)
    config = json.loads((tmp_path / "agent_0" / "adapter_config.json").read_text(encoding="utf-8"))
    adapted = {name.rsplit(".")[-1] for name in config["target_modules"]}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
