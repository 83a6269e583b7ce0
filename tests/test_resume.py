"""Plain resume: a run that stops and goes on from a checkpoint ends as one that never stopped, bit for bit."""

import shutil
from contextlib import suppress

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from helpers import save_model, tiny
from pbrl_lightning import AgentTeam, CurrentComparator, HistoryComparator, LambdaDecayReplay, LoraOptions
from pbrl_lightning.callbacks import ComparatorHistory
from training_runs import (
    EVAL_ITEMS,
    CountingReward,
    Killer,
    Recorder,
    StopError,
    make_data,
    make_module,
    make_team,
    make_trainer,
    round_files,
    same_weights,
    weights_of,
)

LORA = pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
SLOW = pytest.mark.slow
ROUNDS = 3


class Stopper(Callback):
    """Asks the trainer to stop after a number of steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step >= self.step:
            trainer.should_stop = True


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step)


class Rates(Callback):
    """The learning rate of every group at each step."""

    def __init__(self):
        self.rates = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates[trainer.global_step] = [group["lr"] for group in trainer.optimizers[0].param_groups]


def start(root, name, lora, callbacks=(), checkpoint=None, reward=None, data=None, module=None, **options):
    """One fit with a checkpoint per step; ``checkpoint`` resumes."""
    comparator = (data or {}).pop("comparator", None) or HistoryComparator(2)
    recorder, rates = Recorder(), Rates()
    saver = ModelCheckpoint(
        root / name / "checkpoints",
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=-1,
        auto_insert_metric_name=False,
    )
    options = {"max_epochs": None, **options}
    trainer = make_trainer(root / name, [recorder, rates, saver, *callbacks], enable_checkpointing=True, **options)
    settings = {
        "comparator": comparator,
        "replay": LambdaDecayReplay(0.5, sample_size=5),
        "eval_items": None,
        "replay_dir": str(root / name / "replay") if checkpoint is None else None,
        **(data or {}),
    }
    data = make_data(reward or CountingReward(), **settings)
    team = make_team(lora)
    module = make_module(team, rounds=ROUNDS, lr_scheduler=warm_up, **(module or {}))
    with suppress(StopError):
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return trainer, team, data, recorder, rates


def checkpoint_at(root, name, step):
    return str(root / name / "checkpoints" / f"{step}.ckpt")


def assert_same_end(whole, resumed):
    """Weights, optimizer state, rounds, counters."""
    trainer, team, data, *_ = whole
    other_trainer, other_team, other_data, *_ = resumed
    assert other_trainer.global_step == trainer.global_step
    assert same_weights(weights_of(team), weights_of(other_team))
    ours, theirs = trainer.optimizers[0].state_dict()["state"], other_trainer.optimizers[0].state_dict()["state"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[i][key], theirs[i][key]) for i in ours for key in ours[i])
    timeless = [
        [{**vars(record), "seconds": 0, "tokens_per_second": 0} for record in records]
        for records in (data.rounds, other_data.rounds)
    ]
    assert timeless[0] == timeless[1]
    assert data.env_step == other_data.env_step
    assert data.current_round == other_data.current_round


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """One adapter team's run that nobody stopped, and its round files."""
    root = tmp_path_factory.mktemp("whole")
    return start(root, "whole", True), round_files(root / "whole" / "replay")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=SLOW), True], ids=["full", "lora"])
def test_fault_B65_B67_B68_B73_B88_resumed_at_every_step_boundary(tmp_path, lora):
    whole = start(tmp_path, "whole", lora)
    steps = whole[0].global_step
    assert steps == 9  # 3 rounds of 5 pairs in batches of 2: odd ends included
    files = round_files(tmp_path / "whole" / "replay")
    for step in range(1, steps):
        name = f"stopped_{step}"
        reward = CountingReward()
        stopped = start(tmp_path, name, lora, [Killer(step)], reward=reward)
        assert stopped[0].global_step == step
        resumed = start(tmp_path, name, lora, checkpoint=checkpoint_at(tmp_path, name, step), reward=reward)
        assert_same_end(whole, resumed)
        assert round_files(tmp_path / name / "replay") == files
        # A killed run had begun the next round already where it stopped after a round's last step: never one more.
        assert reward.calls == ROUNDS * 6
        starts = [event for event in stopped[3].events + resumed[3].events if event.startswith("start")]
        assert starts == ["start 1", "start 2", "start 3"]
        rates = {**stopped[4].rates, **resumed[4].rates}
        assert rates == whole[4].rates


@pytest.mark.parametrize("how", ["max_steps", "should_stop"])
@pytest.mark.parametrize("step", [3, 4, pytest.param(2, marks=SLOW), pytest.param(6, marks=SLOW)])
def test_stopped_in_an_orderly_way(tmp_path, whole_run, how, step):
    whole, files = whole_run
    if how == "max_steps":
        stopped = start(tmp_path, "stopped", True, max_steps=step)
    else:
        stopped = start(tmp_path, "stopped", True, [Stopper(step)])
    assert stopped[0].global_step == step
    ends = [event for event in stopped[3].events if event.startswith("end")]
    assert ends == [f"end {number}" for number in range(1, step // 3 + 1)]
    resumed = start(tmp_path, "stopped", True, checkpoint=checkpoint_at(tmp_path, "stopped", step))
    assert_same_end(whole, resumed)
    assert round_files(tmp_path / "stopped" / "replay") == files
    saved = AgentTeam(str(tmp_path / "stopped" / "history" / "iteration_0002")).load()
    assert same_weights(weights_of(saved), weights_of(whole[1]))


def test_fault_B88_a_run_that_went_on_after_its_last_checkpoint(tmp_path):
    # Killed in round 3, its last checkpoint lies in round 2: round 3's file exists already.
    whole = start(tmp_path, "whole", True, data={"comparator": HistoryComparator(1)})
    start(tmp_path, "stopped", True, [Killer(8)], data={"comparator": HistoryComparator(1)})
    assert "iteration_0003.json" in round_files(tmp_path / "stopped" / "replay")
    for step in (5, 6):
        shutil.copytree(tmp_path / "stopped", tmp_path / f"from_{step}")
        data = {"comparator": HistoryComparator(1), "replay_dir": str(tmp_path / f"from_{step}" / "replay")}
        resumed = start(
            tmp_path, f"from_{step}", True, checkpoint=checkpoint_at(tmp_path, f"from_{step}", step), data=data
        )
        assert_same_end(whole, resumed)
        assert round_files(tmp_path / f"from_{step}" / "replay") == round_files(tmp_path / "whole" / "replay")


@pytest.mark.parametrize("steps", [(2, 5), (3, 6), pytest.param((1, 2), marks=SLOW)])
def test_stopped_and_resumed_twice(tmp_path, whole_run, steps):
    whole, files = whole_run
    first, second = steps
    start(tmp_path, "stopped", True, [Killer(first)])
    start(tmp_path, "stopped", True, [Killer(second)], checkpoint=checkpoint_at(tmp_path, "stopped", first))
    resumed = start(tmp_path, "stopped", True, checkpoint=checkpoint_at(tmp_path, "stopped", second))
    assert_same_end(whole, resumed)
    assert round_files(tmp_path / "stopped" / "replay") == files


def test_a_checkpoint_saved_inside_a_resumed_round_still_knows_the_rounds(tmp_path):
    start(tmp_path, "run", True, [Killer(4)])
    start(tmp_path, "run", True, [Killer(5)], checkpoint=checkpoint_at(tmp_path, "run", 4))
    state = torch.load(checkpoint_at(tmp_path, "run", 5), weights_only=True)["PreferenceDataModule"]
    assert [entry["iteration"] for entry in state["store"]["entries"]] == [1, 2]
    assert state["replay_dir"] == str(tmp_path / "run" / "replay")


@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=SLOW) for step in (1, 2, 3, 4, 6, 7))])
def test_fault_B65_B67_several_epochs_a_round_and_accumulation(tmp_path, step):
    options = {"module": {"num_train_epochs": 2}, "accumulate_grad_batches": 2}
    data = {"comparator": CurrentComparator(), "replay": None, "batch_size": 3}
    whole = start(tmp_path, "whole", True, data=dict(data), **options)
    assert whole[0].global_step >= 8
    start(tmp_path, "stopped", True, [Killer(step)], data=dict(data), **options)
    resumed = start(
        tmp_path, "stopped", True, checkpoint=checkpoint_at(tmp_path, "stopped", step), data=dict(data), **options
    )
    assert_same_end(whole, resumed)
    assert [e for e in resumed[3].events if e.startswith("end")][-1] == "end 3"


def test_fault_B10_B88_a_base_run_keeps_the_sampled_ids(tmp_path):
    def base(name, callbacks=(), checkpoint=None):
        saver = ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
        )
        reward, team = CountingReward(), make_team(True)
        data = make_data(
            reward,
            iterative=False,
            eval_items=None,
            batch_size=4,
            pairs_per_sample=4,
            replay_dir=str(tmp_path / name / "replay"),
        )
        trainer = make_trainer(tmp_path / name, [saver, *callbacks], enable_checkpointing=True)
        with suppress(StopError):
            trainer.fit(make_module(team, num_train_epochs=2), data, ckpt_path=checkpoint, weights_only=True)
        return trainer, weights_of(team), reward.calls

    trainer, whole, calls = base("whole")
    assert trainer.global_step == 6
    assert calls == 3
    for step in range(1, 6):
        base(f"stopped_{step}", [Killer(step)])
        _, weights, calls = base(f"stopped_{step}", checkpoint=str(tmp_path / f"stopped_{step}" / f"{step}.ckpt"))
        assert same_weights(weights, whole)
        assert calls == 0  # nothing is collected again


@pytest.mark.parametrize(
    ("empty", "every"),
    [({2}, 9), pytest.param({1}, 9, marks=SLOW), *(pytest.param({n}, 1, marks=SLOW) for n in (1, 2, 3))],
)
def test_fault_B83_rounds_without_pairs(tmp_path, empty, every):
    ties = {6 * (number - 1) + call for number in empty for call in range(6)}
    plain = {"replay": None, "comparator": HistoryComparator(1)}
    whole = start(tmp_path, "whole", True, reward=CountingReward(ties), data=dict(plain))
    ends = [record.first_step for record in whole[2].rounds]  # where the traps are: the last step of a round
    for step in sorted({*range(every, whole[0].global_step, every), *ends[1:]} - {0, whole[0].global_step}):
        name = f"stopped_{step}"
        reward = CountingReward(ties)
        stopped = start(tmp_path, name, True, [Killer(step)], reward=reward, data=dict(plain))
        resumed = start(
            tmp_path, name, True, checkpoint=checkpoint_at(tmp_path, name, step), reward=reward, data=dict(plain)
        )
        assert_same_end(whole, resumed)
        assert reward.calls == 18
        events = [event for event in stopped[3].events + resumed[3].events if event != "batch"]
        assert events == [event for event in whole[3].events if event != "batch"]


@LORA
def test_fault_B79_B80_checkpoints_are_plain_and_hold_what_is_trained(tmp_path, lora):
    _, team, *_ = start(tmp_path, "run", lora, [Killer(5)], data={"eval_items": EVAL_ITEMS})
    checkpoint = torch.load(checkpoint_at(tmp_path, "run", 5), weights_only=True)
    plain = (dict, list, tuple, str, int, float, bool, type(None), torch.Tensor)

    def walk(value, path):
        assert type(value) in plain or type(value).__name__ == "OrderedDict", f"{path}: {type(value)}"
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        for key, entry in value.items() if isinstance(value, dict) else ():
            walk(entry, f"{path}/{key}")

    walk(checkpoint, "")
    names = {
        f"team.backbones.{index}.{name}"
        for index, backbone in enumerate(team.backbones)
        for name, parameter in backbone.named_parameters()
        if parameter.requires_grad
    }
    assert set(checkpoint["state_dict"]) == names
    if lora:
        assert all("lora_" in name for name in names)


def test_fault_B59_B79_a_tied_frozen_backbone_is_not_saved(tmp_path):
    path = save_model(tiny("gpt2", torch.float32), tmp_path / "gpt2")
    team = AgentTeam(path, num_agents=2, lora=LoraOptions(r=2))
    saver = ModelCheckpoint(tmp_path / "c", filename="last", every_n_train_steps=1)
    trainer = make_trainer(tmp_path, [saver], enable_checkpointing=True, max_steps=1)
    trainer.fit(make_module(team, rounds=1), make_data(eval_items=None))
    names = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["state_dict"].keys()
    assert names
    assert all("lora_" in name for name in names)


@LORA
def test_fault_B79_a_checkpoint_of_other_weights_is_refused(tmp_path, lora):
    start(tmp_path, "run", lora, [Killer(2)])
    path = checkpoint_at(tmp_path, "run", 2)
    checkpoint = torch.load(path, weights_only=True)
    name = sorted(checkpoint["state_dict"])[0]
    value = checkpoint["state_dict"].pop(name)
    torch.save(checkpoint, path)
    with pytest.raises(KeyError, match=f"1 trained weights are missing from the checkpoint, such as '{name}'"):
        start(tmp_path, "run", lora, checkpoint=path)
    checkpoint["state_dict"][name] = checkpoint["state_dict"]["other"] = value
    torch.save(checkpoint, path)
    with pytest.raises(KeyError, match="has 1 weights that this run does not have, such as 'other'"):
        start(tmp_path, "run", lora, checkpoint=path)


def test_a_history_directory_of_the_users_own_and_a_resume_inside_a_round(tmp_path):
    def history():
        return ComparatorHistory(str(tmp_path / "policies"), keep_all=True)

    whole = start(tmp_path, "whole", True, [ComparatorHistory(str(tmp_path / "other"), keep_all=True)])
    start(tmp_path, "run", True, [Killer(4), history()])
    resumed = start(tmp_path, "run", True, [history()], checkpoint=checkpoint_at(tmp_path, "run", 4))
    assert_same_end(whole, resumed)
    for name in ("initial", "iteration_0000", "iteration_0001", "iteration_0002"):
        saved, other = (AgentTeam(str(tmp_path / root / name)).load() for root in ("policies", "other"))
        assert same_weights(weights_of(saved), weights_of(other))


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    whole = start(tmp_path, "whole", True)
    files = round_files(tmp_path / "whole" / "replay")
    reward = CountingReward()
    resumed = start(tmp_path, "whole", True, checkpoint=checkpoint_at(tmp_path, "whole", 9), reward=reward)
    assert same_weights(weights_of(resumed[1]), weights_of(whole[1]))
    assert resumed[0].global_step == 9
    assert reward.calls == 0
    assert round_files(tmp_path / "whole" / "replay") == files


def test_fault_B84_evaluation_results_survive(tmp_path):
    from pbrl_lightning.callbacks import JointEvaluation

    found = []
    for step in (None, 4):
        evaluation = JointEvaluation(interval=2)
        name = f"run_{step}"
        start(tmp_path, name, True, [evaluation, *([Killer(step)] if step else [])], data={"eval_items": EVAL_ITEMS})
        if step:
            evaluation = JointEvaluation(interval=2)
            start(
                tmp_path,
                name,
                True,
                [evaluation],
                checkpoint=checkpoint_at(tmp_path, name, step),
                data={"eval_items": EVAL_ITEMS},
            )
        found.append(evaluation.results)
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [0, 2, 4, 6, 8, 9]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_lightnings_own_checkpoint_at_the_end_of_a_stopped_run(tmp_path, whole_run, step):
    whole, _ = whole_run
    saver = ModelCheckpoint(tmp_path / "own", filename="end")  # after every epoch, Lightning's default
    start(tmp_path, "stopped", True, [saver], max_steps=step)
    resumed = start(tmp_path, "stopped", True, checkpoint=str(tmp_path / "own" / "end.ckpt"))
    assert_same_end(whole, resumed)
