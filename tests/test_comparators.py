"""Comparators: who speaks, with which weights, and that nothing of the actors changes."""

import copy
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import live_tensor_bytes, save_model, tiny
from pbrl_lightning import CurrentComparator, CurrentCopyComparator, HistoryComparator, ModelComparator
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.callbacks import ComparatorHistory
from pbrl_lightning.comparators.base import CollectionPhase
from pbrl_lightning.comparators.history import history_name
from training_runs import (
    ITEMS,
    SAMPLING,
    CountingReward,
    Recorder,
    make_data,
    make_module,
    make_team,
    make_trainer,
    perturb,
    same_weights,
    weights_of,
)

LORA = pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])


def say(speaker, stream="comparator", step=2):
    """The sampled ids of two items, five candidates."""
    samples = speaker.sample(ITEMS[:2], [0, 1], num_candidates=5, sampling=SAMPLING, seed=0, stream=stream, step=step)
    return [[sample.token_ids(k) for k in range(5)] for sample in samples]


def state_of(team):
    """Everything that a comparator must leave as it is."""
    modes = [module.training for module in team.modules()]
    flags = {name: parameter.requires_grad for name, parameter in team.named_parameters()}
    active = [getattr(module, "_active_adapter", None) for module in team.modules()]
    cache = [team.model(agent).config.use_cache for agent in range(team.num_agents)]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in team.modules())
    gradients = {name: parameter.grad is None for name, parameter in team.named_parameters()}
    return modes, flags, copy.deepcopy(active), cache, hooks, gradients


def all_values(team):
    return {name: value.clone() for name, value in team.state_dict().items()}


def assert_untouched(team, values, state):
    assert all(torch.equal(value, values[name]) for name, value in team.state_dict().items())
    assert state_of(team) == state


@LORA
def test_current_speaks_with_the_actors_weights_and_a_stream_of_its_own(lora):
    team = perturb(make_team(lora).load(), 1)
    values, state = all_values(team), state_of(team)
    with CurrentComparator().session(team, CollectionPhase(2)) as speaker:
        assert say(speaker) == say(team)
        assert say(speaker) != say(team, stream="actors")
    assert_untouched(team, values, state)


@LORA
def test_fault_B62_a_frozen_copy_speaks_the_same_and_shares_nothing(lora):
    team = perturb(make_team(lora).load(), 1)
    ids = torch.tensor([[0, 70, 71, 72]])
    with team.active(1):
        team.model(1)(input_ids=ids).logits.sum().backward()  # parameters with gradients can be copied (B62)
    values, state = all_values(team), state_of(team)
    twin = team.frozen_copy()
    assert say(twin) == say(team)
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in team.parameters()}
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in twin.parameters())
    assert not any(module.training for module in twin.modules())
    assert_untouched(team, values, state)
    before = say(twin)
    perturb(team, 2, scale=0.5)
    assert say(twin) == before != say(team)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu:0"], ["cpu", "cpu"]])
def test_no_copy_where_the_actors_are(devices):
    team = make_team().load()
    with CurrentCopyComparator(devices).session(team, CollectionPhase(1)) as speaker:
        assert speaker is team


def test_fault_B62_a_copy_goes_to_its_devices_once_per_phase_and_is_freed():
    team = make_team(dtype="float64").load()
    comparator = CurrentCopyComparator(["meta"])  # stands for another device: nothing can be sampled on it
    with comparator.session(team, CollectionPhase(1)) as speaker:
        assert speaker is not team
        assert {parameter.device.type for parameter in speaker.parameters()} == {"meta"}
        assert speaker.num_agents == 2
    assert {parameter.device.type for parameter in team.parameters()} == {"cpu"}


@pytest.mark.parametrize("devices", [[], ["cuda:x"], ["nowhere"]])
def test_devices_are_checked_at_once(devices):
    for make in (
        lambda: CurrentCopyComparator(devices),
        lambda: HistoryComparator(devices=devices),
        lambda: ModelComparator("builtin:tiny", devices=devices),
    ):
        with pytest.raises(ValueError, match="`devices` must"):
            make()


@pytest.mark.parametrize("count", [0, -1])
def test_counts_are_checked_at_once(count):
    for make in (
        CurrentComparator,
        HistoryComparator,
        lambda **options: ModelComparator("builtin:tiny", **options),
        lambda **options: CurrentCopyComparator(["cpu"], **options),
    ):
        with pytest.raises(ValueError, match=f"`num_candidates` must be >= 1 or null, got {count}"):
            make(num_candidates=count)
    with pytest.raises(ValueError, match=f"`k` must be >= 1 .*got {count}"):
        HistoryComparator(k=count)


def test_history_names():
    assert [history_name(count) for count in (-2, 0, 1, 2, 12)] == [
        "initial",
        "initial",
        "iteration_0000",
        "iteration_0001",
        "iteration_0011",
    ]


@pytest.fixture
def saved(tmp_path, request):
    """A team, and the policies ``initial`` … ``iteration_0002`` it had."""
    team = make_team(request.param).load()
    stages = []
    for completed in range(4):
        perturb(team, completed, scale=0.1)
        team.save(tmp_path / history_name(completed))
        stages.append((weights_of(team), say(team)))
    perturb(team, 9, scale=0.1)
    return team, tmp_path, stages


SAVED = pytest.mark.parametrize("saved", [False, True], ids=["full", "lora"], indirect=True)


@SAVED
@pytest.mark.parametrize(
    ("k", "round_number", "stage"), [(1, 1, 0), (1, 4, 3), (2, 1, 0), (2, 2, 0), (2, 4, 2), (3, 4, 1)]
)
def test_history_speaks_with_the_policy_of_k_rounds_ago(saved, k, round_number, stage):
    team, directory, stages = saved
    values, state, now = all_values(team), state_of(team), say(team)
    weights, words = stages[stage]
    with HistoryComparator(k).session(team, CollectionPhase(round_number, directory)) as speaker:
        assert say(speaker) == words != now
        spoken = [
            dict(speaker.backbone(agent).named_parameters())
            if speaker.adapter(agent) is None
            else speaker.agent_parameters(agent)
            for agent in range(2)
        ]
        for agent in range(2):
            for name, value in weights[agent].items():
                assert torch.equal(spoken[agent][name], value), name
    assert_untouched(team, values, state)
    assert say(team) == now


@SAVED
def test_fault_B51_history_is_put_back_when_sampling_fails(saved):
    team, directory, _ = saved
    values, state = all_values(team), state_of(team)

    def fail():
        with HistoryComparator(1).session(team, CollectionPhase(3, directory)):
            raise KeyError("reward")

    with pytest.raises(KeyError):
        fail()
    assert_untouched(team, values, state)


@SAVED
def test_fault_B63_history_is_freed_after_the_phase(saved):
    team, directory, _ = saved
    comparator = HistoryComparator(2)
    with comparator.session(team, CollectionPhase(4, directory)) as speaker:
        say(speaker)
    del speaker
    before = live_tensor_bytes()
    parameters = sum(p.numel() * p.element_size() for p in team.parameters())
    with comparator.session(team, CollectionPhase(4, directory)) as speaker:
        within = live_tensor_bytes()
    del speaker
    assert live_tensor_bytes() - before < 0.01 * parameters
    # Adapters go into the team's own backbone: no second backbone while they speak.
    assert within - before < (0.5 if team.adapter(0) else 1.2) * parameters


@SAVED
def test_fault_B90_a_half_written_policy_is_named(saved):
    team, directory, _ = saved
    shutil.rmtree(directory / "iteration_0001" / "agent_1")
    broken = HistoryComparator(1).session(team, CollectionPhase(3, directory))
    with pytest.raises(FileNotFoundError, match=r"iteration_0001/agent_1.*round 3"), broken:
        pass
    for path in (directory / "iteration_0000" / "agent_0").glob("*.safetensors"):
        path.unlink()
    broken = HistoryComparator(1).session(team, CollectionPhase(2, directory))
    with pytest.raises(OSError, match=r"iteration_0000/agent_0"), broken:
        pass


def test_history_without_checkpoints_says_what_to_add():
    nowhere = HistoryComparator().session(make_team(), CollectionPhase(1))
    with pytest.raises(RuntimeError, match="ComparatorHistory"), nowhere:
        pass


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_history_keeps_the_actors_dtype(dtype, tmp_path):
    team = perturb(make_team(dtype=dtype).load(), 1)
    team.save(tmp_path / "initial")
    with HistoryComparator().session(team, CollectionPhase(1, tmp_path)) as speaker:
        assert {str(parameter.dtype) for parameter in speaker.parameters()} == {f"torch.{dtype}"}
        assert say(speaker) == say(team)


class Spied(HistoryComparator):
    """Remembers the weights that spoke in each round."""

    def __init__(self, k):
        super().__init__(k)
        self.spoke = {}

    def session(self, team, phase):
        outer, inner = self, super().session(team, phase)

        class Session:
            def __enter__(self):
                speaker = inner.__enter__()
                outer.spoke[phase.round_number] = [
                    {
                        name: value.detach().clone()
                        for name, value in speaker.backbone(agent).named_parameters()
                        if speaker.adapter(agent) is None or f".agent_{agent}." in name
                    }
                    for agent in range(2)
                ]
                return speaker

            def __exit__(self, *error):
                return inner.__exit__(*error)

        return Session()


@LORA
@pytest.mark.parametrize("k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3))])
def test_history_in_a_run(k, lora, tmp_path):
    comparator, recorder, team = Spied(k), Recorder(), make_team(lora)
    trainer = make_trainer(tmp_path, [recorder])
    trainer.fit(make_module(team, rounds=4), make_data(comparator=comparator, replay=None))
    rounds = recorder.round_weights
    assert not same_weights(rounds[1], rounds[2])
    assert not same_weights(rounds[3], rounds[4])
    for round_number in range(1, 5):
        assert same_weights(comparator.spoke[round_number], rounds[max(1, round_number - k + 1)])
    # Nothing of the old policies is a parameter of the team, nor known to the optimizer.
    assert len(list(team.parameters())) == len(list(make_team(lora).load().parameters()))
    optimized = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    own = [p for agent in range(2) for p in team.agent_parameters(agent).values()]
    assert sorted(map(id, optimized)) == sorted(map(id, own))
    # Round 5 would need the policy after round 5 - k.
    kept = {"initial"} | {f"iteration_{completed - 1:04d}" for completed in range(1, 5) if completed >= 5 - k}
    assert {path.name for path in (tmp_path / "history").iterdir()} == kept


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@LORA
def test_fault_B49_kept_policies_load_in_plain_transformers_and_peft(lora, tmp_path):
    recorder, team = Recorder(), make_team(lora)
    callback = ComparatorHistory(str(tmp_path / "kept"), keep_all=True)
    data = make_data(comparator=HistoryComparator(1))
    make_trainer(tmp_path, [recorder, callback]).fit(make_module(team, rounds=3), data)
    names = {"initial": 1, "iteration_0000": 2, "iteration_0001": 3}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {*names, "iteration_0002"}
    final = weights_of(team)
    ids = torch.tensor([[0, 70, 71, 72, 73]])
    for name, weights in [*((name, recorder.round_weights[r]) for name, r in names.items()), ("iteration_0002", final)]:
        with torch.no_grad():
            for agent in range(2):
                for parameter, value in weights[agent].items():
                    team.agent_parameters(agent)[parameter].copy_(value)
        for agent in range(2):
            directory = tmp_path / "kept" / name / f"agent_{agent}"
            assert (
                AutoTokenizer.from_pretrained(directory)("ab")["input_ids"] == team.tokenizer(agent)("ab")["input_ids"]
            )
            if lora:
                assert not list(directory.glob("model*.safetensors"))  # the adapter alone
                base = AutoModelForCausalLM.from_pretrained(
                    AgentTeam("builtin:tiny", num_agents=1).load().model(0).name_or_path
                )
                model = PeftModel.from_pretrained(base, directory)
            else:
                model = AutoModelForCausalLM.from_pretrained(directory)
            with torch.no_grad(), team.active(agent):
                assert torch.equal(model.eval()(input_ids=ids).logits, team.model(agent)(input_ids=ids).logits)


def test_the_history_callback_comes_by_itself_and_only_where_needed(tmp_path):
    for comparator, expected in ((CurrentComparator(), 0), (HistoryComparator(), 1)):
        trainer = make_trainer(tmp_path / str(expected))
        trainer.fit(make_module(rounds=1), make_data(comparator=comparator))
        assert sum(isinstance(callback, ComparatorHistory) for callback in trainer.callbacks) == expected
        assert (tmp_path / str(expected) / "history").is_dir() == bool(expected)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two different models on disk, one of another architecture, and two adapters on the tiny one."""
    root = tmp_path_factory.mktemp("models")
    llama = save_model(tiny("llama", torch.float32, seed=5), root / "llama")
    gpt2 = save_model(tiny("gpt2", torch.float32, seed=6), root / "gpt2")
    perturb(make_team(lora=True).load(), 4, scale=0.3).save(root / "adapters")
    return {"llama": llama, "gpt2": gpt2, "adapters": root / "adapters"}


def reference_words(models):
    """What these models say as a team of their own."""
    return say(AgentTeam(models).load())


def test_one_model_for_all_roles_is_loaded_once(models):
    team = make_team().load()
    values, state = all_values(team), state_of(team)
    comparator = ModelComparator(models["llama"])
    with comparator.session(team, CollectionPhase(1)) as speaker:
        assert say(speaker) == reference_words([models["llama"], models["llama"]]) != say(team)
        assert speaker.backbone(0) is speaker.backbone(1)
        assert not any(parameter.requires_grad for parameter in speaker.parameters())
        first = speaker
    with comparator.session(team, CollectionPhase(2)) as speaker:
        assert speaker is first
    assert_untouched(team, values, state)


def test_one_model_per_role(models):
    team = make_team().load()
    names = [models["gpt2"], models["llama"]]
    with ModelComparator(names).session(team, CollectionPhase(1)) as speaker:
        assert say(speaker) == reference_words(names)


@pytest.mark.parametrize("listed", [False, True])
def test_adapter_directories(models, listed):
    team = make_team().load()
    names = [str(models["adapters"] / f"agent_{agent}") for agent in range(2)]
    with ModelComparator(names if listed else str(models["adapters"])).session(team, CollectionPhase(1)) as speaker:
        expected = perturb(make_team(lora=True).load(), 4, scale=0.3)
        assert say(speaker) == say(expected) != say(team)
        assert speaker.backbone(0) is speaker.backbone(1)
    with ModelComparator(names[1]).session(team, CollectionPhase(1)) as speaker:
        assert say(speaker) == reference_words([names[1], names[1]])


def test_loaded_models_and_own_formatters(models):
    team = make_team(formatters="{prompt}").load()
    objects = [AutoModelForCausalLM.from_pretrained(models["llama"]) for _ in range(2)]
    comparator = ModelComparator(objects, tokenizers=team.tokenizer(0), formatters=["X {prompt}", "Y {prompt}"])
    with comparator.session(team, CollectionPhase(1)) as speaker:
        sample = speaker.sample(ITEMS[:1], [0], num_candidates=1, sampling=SAMPLING, seed=0, stream="comparator")[0]
        assert sample.prompts == ["X a", "Y a"]


def test_the_actors_formatters_are_taken_by_default(models):
    team = make_team(formatters=["one {prompt}", "two {prompt}"]).load()
    with ModelComparator(models["llama"]).session(team, CollectionPhase(1)) as speaker:
        sample = speaker.sample(ITEMS[:1], [0], num_candidates=1, sampling=SAMPLING, seed=0, stream="comparator")[0]
        assert sample.prompts == ["one a", "two a"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_models_is_found_before_anything_is_loaded_or_scored(count, models, tmp_path):
    team, reward = make_team(), CountingReward()
    data = make_data(reward, comparator=ModelComparator([models["llama"]] * count))
    with pytest.raises(ValueError, match=f"one for all roles or 2, got {count}"):
        make_trainer(tmp_path).fit(make_module(team, rounds=1), data)
    assert not team.is_loaded
    assert reward.calls == 0


def test_a_model_comparator_in_a_run(models, tmp_path):
    team = make_team()
    data = make_data(comparator=ModelComparator(models["llama"], num_candidates=2))
    trainer = make_trainer(tmp_path)
    trainer.fit(make_module(team, rounds=2), data)
    assert len(data.rounds) == 2
    assert len(list(trainer.lightning_module.parameters())) == len(list(make_team().load().parameters()))
    assert data.env_step == 2 * 3 * (4 + 2)
