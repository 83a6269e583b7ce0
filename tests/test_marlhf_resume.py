"""What a MARLHF run leaves behind: checkpoints that it goes on from bit for bit, exports, evaluations and logs."""

import csv
import json
import math
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import LambdaLR

from helpers import assert_close
from pbrl_lightning import AttachedCritics, JointCritic, JointRewardModel, LambdaDecayReplay, MARLHFModule, ReferenceKL
from pbrl_lightning.batches import RolloutBatch, TokenBatch
from pbrl_lightning.callbacks import JointEvaluation
from training_runs import (
    EVAL_ITEMS,
    ITEMS,
    CountingReward,
    Killer,
    Recorder,
    StopError,
    make_data,
    make_team,
    make_trainer,
    round_files,
)

ITEM_CALLS = 2 * len(ITEMS)  # reward calls of a round's collection: both sides of each item
STEPS = 10  # in each of two rounds two batches of pairs, then three minibatches of one item
SLOW = pytest.mark.slow
TEAM = partial(JointRewardModel, "team")
# A LoRA team or not, what the module gets, what the data module gets.
KINDS = {
    "full": (False, {"reference_kl": ReferenceKL}, {}),
    "lora": (True, {"reward_model": TEAM}, {"preference_scoring_reward": "reward_model"}),
    "maac": (True, {"reward_model": TEAM, "rl_algorithm": "maac", "critic": partial(JointCritic, "team")}, {}),
    "iac": (False, {"rl_algorithm": "iac", "critic": AttachedCritics}, {"replay": partial(LambdaDecayReplay, 0.5)}),
}


class Watch(Recorder):
    """Every batch, the learning rates of its step, and each group's gradient norm before and after clipping."""

    def __init__(self):
        super().__init__()
        self.batches, self.rates, self.raw, self.clipped = [], {}, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)
        self.rates[trainer.global_step] = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.raw.append(gradient_norms(optimizer))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.clipped.append(gradient_norms(trainer.optimizers[0]))

    def starts(self):
        return [event for event in self.events if event.startswith("start")]


def gradient_norms(optimizer):
    grads = {g["name"]: [p.grad.norm() for p in g["params"] if p.grad is not None] for g in optimizer.param_groups}
    return {name: torch.stack(norms).norm().item() for name, norms in grads.items() if norms}


def warm_up(optimizer):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step)


def make_marlhf(team=None, rounds=2, **options):
    short = {"num_reward_epochs": 1, "num_train_epochs": 1, "num_generations": 2}
    rates = {"learning_rate": 1e-3, "reward_learning_rate": 1e-3}
    return MARLHFModule(team or make_team(), num_iterations=rounds, **{**short, **rates, **options})


def some_data(reward, **options):
    """One pair per item; rollouts of two items and of one, in minibatches of one."""
    return make_data(reward, **{"eval_items": None, "pairs_per_sample": 1, "train_batch_size": 1, **options})


def fit(root, module, data, callbacks=(), checkpoint=None, **options):
    """One fit with a checkpoint per step; ``checkpoint`` resumes."""
    every = {"every_n_train_steps": 1, "save_top_k": -1, "auto_insert_metric_name": False}
    watch, saver = Watch(), ModelCheckpoint(root / "checkpoints", "{step}", **every)
    options = {"enable_checkpointing": True, "max_epochs": None, **options}
    trainer = make_trainer(root, [watch, saver, *callbacks], **options)
    with warnings.catch_warnings(), suppress(StopError):
        warnings.simplefilter("ignore")
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return trainer, module, data, watch


def start(root, kind, callbacks=(), checkpoint=None, reward=None, **options):
    lora, module, data = KINDS[kind]
    made = [{n: v() if callable(v) else v for n, v in given.items()} for given in (module, data)]
    replay = str(root / "replay") if checkpoint is None else None
    data = some_data(reward or CountingReward(), **{"batch_size": 2, "replay_dir": replay, **made[1]})
    module = make_marlhf(make_team(lora), lr_scheduler=warm_up, **made[0])
    return fit(root, module, data, callbacks, checkpoint, **options)


def checkpoint_at(root, step):
    return str(root / "checkpoints" / f"{step}.ckpt")


def trained(module):
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def assert_same_end(whole, resumed):
    """Weights of team, reward model and critic, optimizer state, rounds, counters."""
    (trainer, module, data, _), (other_trainer, other, other_data, _) = whole, resumed
    ours, theirs = trained(module), trained(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert (other_trainer.global_step, other.policy_updates) == (trainer.global_step, module.policy_updates)
    states = [t.optimizers[0].state_dict()["state"] for t in (trainer, other_trainer)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][i][key], states[1][i][key]) for i in states[0] for key in states[0][i])
    timeless = [[{**vars(r), "seconds": 0, "tokens_per_second": 0} for r in d.rounds] for d in (data, other_data)]
    assert timeless[0] == timeless[1]
    assert (other_data.env_step, other_data.current_round) == (data.env_step, data.current_round)


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """Runs that nobody stopped, with their round files and the calls of the task reward, made when asked for."""
    runs = {}

    def whole(kind):
        if kind not in runs:
            root, reward = tmp_path_factory.mktemp(kind), CountingReward()
            epochs = ModelCheckpoint(
                root / "checkpoints", "epoch_{epoch}", save_top_k=-1, auto_insert_metric_name=False
            )
            run = start(root, kind, [epochs], reward=reward)
            assert run[0].global_step == STEPS
            runs[kind] = (run, round_files(root / "replay"), reward.calls, root)
        return runs[kind]

    return whole


# -- plain resume --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("full", "killed"),
        ("lora", "max_steps"),
        ("maac", "killed"),
        *(pytest.param(kind, how, marks=SLOW) for kind, how in [("lora", "killed"), ("iac", "max_steps")]),
    ],
)
def test_fault_B65_B67_B68_B73_B88_resumed_at_every_step_boundary(tmp_path, whole_runs, kind, how):
    whole, files, calls, _ = whole_runs(kind)
    assert calls == (ITEM_CALLS if kind == "lora" else 2 * ITEM_CALLS)  # its round 2 is scored by round 1's model
    for step in range(1, STEPS):
        root, reward = tmp_path / str(step), CountingReward()
        stop = {"callbacks": [Killer(step)]} if how == "killed" else {"max_steps": step}
        stopped = start(root, kind, reward=reward, **stop)
        assert stopped[0].global_step == step
        resumed = start(root, kind, checkpoint=checkpoint_at(root, step), reward=reward)
        assert_same_end(whole, resumed)
        assert round_files(root / "replay") == files
        assert reward.calls == calls
        assert stopped[3].starts() + resumed[3].starts() == ["start 1", "start 2"]
        assert {**stopped[3].rates, **resumed[3].rates} == whole[3].rates


@pytest.mark.parametrize("name", ["epoch_0", "epoch_1", "epoch_2", str(STEPS)])
def test_resumed_from_the_end_of_a_phase_and_of_the_run(tmp_path, whole_runs, name):
    whole, *_, root = whole_runs("lora")
    reward = CountingReward()
    assert_same_end(whole, start(tmp_path, "lora", checkpoint=checkpoint_at(root, name), reward=reward))
    assert reward.calls == 0  # what is collected after round 1 is scored by the reward model


def test_stopped_and_resumed_twice(tmp_path, whole_runs):
    whole, files, calls, _ = whole_runs("maac")
    reward = CountingReward()
    start(tmp_path, "maac", [Killer(1)], reward=reward)
    start(tmp_path, "maac", [Killer(4)], checkpoint=checkpoint_at(tmp_path, 1), reward=reward)
    assert_same_end(whole, start(tmp_path, "maac", checkpoint=checkpoint_at(tmp_path, 4), reward=reward))
    assert round_files(tmp_path / "replay") == files
    assert reward.calls == calls


@pytest.mark.slow
@pytest.mark.parametrize("empty", [1, 2, 3])
def test_fault_B83_resumed_around_a_round_without_pairs(tmp_path, empty):
    ties = range(ITEM_CALLS * (empty - 1), ITEM_CALLS * empty)

    def run(name, callbacks=(), checkpoint=None, reward=None):
        data = some_data(reward or CountingReward(ties), batch_size=100, train_batch_size=2)
        module = make_marlhf(make_team(True), 3, reward_model=TEAM())
        return fit(tmp_path / name, module, data, callbacks, checkpoint)

    whole = run("whole")
    assert whole[0].global_step == 6  # one of pairs and two of rollouts, twice
    for step in (1, 3, 5):
        reward = CountingReward(ties)
        stopped = run(str(step), [Killer(step)], reward=reward)
        resumed = run(str(step), checkpoint=checkpoint_at(tmp_path / str(step), step), reward=reward)
        assert_same_end(whole, resumed)
        assert reward.calls == 3 * ITEM_CALLS
        assert stopped[3].starts() + resumed[3].starts() == ["start 1", "start 2", "start 3"]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["collected", "files"])
def test_a_base_run_is_resumed_without_collecting_again(tmp_path, whole_runs, source):
    *_, source_root = whole_runs("full")

    def run(name, callbacks=(), checkpoint=None):
        reward, options = CountingReward(), {"iterative": False, "batch_size": 2}
        if source == "files":
            options["pairs"] = [str(source_root / "replay" / "iteration_0001.json")]
        module = make_marlhf(rounds=None, num_train_epochs=2)
        return fit(tmp_path / name, module, some_data(reward, **options), callbacks, checkpoint), reward.calls

    whole, calls = run("whole")
    assert calls == (len(ITEMS) if source == "collected" else 0)
    assert whole[0].global_step == 2 + 2 * 3
    for step in (1, 2, 4, 5):
        run(str(step), [Killer(step)])
        resumed, calls = run(str(step), checkpoint=checkpoint_at(tmp_path / str(step), step))
        assert_same_end(whole, resumed)
        assert calls == 0


@pytest.mark.slow
def test_fault_B69_counters_and_evaluations_go_on(tmp_path):
    def run(name, callbacks=(), checkpoint=None):
        evaluation, data = JointEvaluation(interval=2), some_data(CountingReward(), eval_items=EVAL_ITEMS)
        callbacks = [evaluation, *callbacks]
        return fit(tmp_path / name, make_marlhf(), data, callbacks, checkpoint, accumulate_grad_batches=2), evaluation

    whole, evaluation = run("whole")
    # In each round three batches of pairs and three of rollouts, two a step and then one.
    assert (whole[0].global_step, whole[1].policy_updates) == (8, 4)
    assert [step for step, _ in evaluation.results] == [0, 4, 8]
    for step in (1, 2, 4, 5, 7):
        run(str(step), [Killer(step)])
        resumed, other = run(str(step), checkpoint=checkpoint_at(tmp_path / str(step), step))
        assert_same_end(whole, resumed)
        assert other.results == evaluation.results


@pytest.mark.slow
def test_a_second_fit_of_the_same_objects_is_a_run_of_its_own(tmp_path):
    module, data, found = make_marlhf(), some_data(CountingReward(), eval_items=EVAL_ITEMS), []
    for name in "ab":
        evaluation = JointEvaluation(interval=4)
        *_, watch = fit(tmp_path / name, module, data, [evaluation])
        assert watch.starts() == ["start 1", "start 2"]
        found.append((module.policy_updates, [step for step, _ in evaluation.results]))
    assert found[0] == found[1]


# -- checkpoints and exports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "maac"])
def test_fault_B63_B79_B80_checkpoints_are_plain_and_hold_what_is_trained(whole_runs, kind):
    (_, module, _, _), *_, root = whole_runs(kind)
    for step in (2, 4, 7):  # between the phases, in the middle of a rollout, in the second round
        checkpoint = torch.load(checkpoint_at(root, step), weights_only=True)
        plain = (dict, list, tuple, str, int, float, bool, type(None), torch.Tensor)
        stack = [checkpoint]
        while stack:
            value = stack.pop()
            assert type(value) in plain or type(value).__name__ == "OrderedDict", type(value)
            stack += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
        assert set(checkpoint["state_dict"]) == set(trained(module))
        assert all("lora_" in name or ".head." in name for name in checkpoint["state_dict"]) == (kind == "maac")


def test_fault_B79_a_checkpoint_without_the_reward_head_is_refused(tmp_path, whole_runs):
    checkpoint = torch.load(checkpoint_at(whole_runs("lora")[-1], 4), weights_only=True)
    del checkpoint["state_dict"]["reward_model.head.weight"]
    torch.save(checkpoint, tmp_path / "lacking.ckpt")
    with pytest.raises(
        KeyError, match=r"1 trained weights are missing from the checkpoint, such as 'reward_model\.head\.weight'"
    ):
        start(tmp_path, "lora", checkpoint=str(tmp_path / "lacking.ckpt"))


PLAIN = """
import json, sys, torch
from pathlib import Path
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
kinds = {"agent_0": AutoModelForCausalLM, "agent_1": AutoModelForCausalLM}
kinds["reward_model"] = AutoModelForSequenceClassification
found = []
for export in map(Path, sys.argv[1:]):
    for name, kind in kinds.items():
        adapted = (export / name / "adapter_config.json").exists()
        model = (AutoPeftModelForCausalLM if adapted else kind).from_pretrained(export / name)
        AutoTokenizer.from_pretrained(export / name)
        found.append(model(input_ids=torch.tensor([[70, 80, 90]])).logits.flatten()[-5:].tolist())
assert "pbrl_lightning" not in sys.modules
print(json.dumps(found))
"""


@pytest.mark.slow
def test_plain_transformers_and_peft_load_the_export(tmp_path, whole_runs):
    runs, expected = [whole_runs("full"), whole_runs("maac")], []
    ids = torch.tensor([[70, 80, 90]])
    with torch.no_grad():
        for (_, module, _, _), *_ in runs:
            for agent in range(2):
                with module.team.active(agent):
                    expected.append(module.team.model(agent)(ids).logits.flatten()[-5:])
            expected.append(module.reward_model(TokenBatch(ids, ids > 0, ids > 70)))
    command = [sys.executable, "-c", PLAIN, *(str(root / "export") for *_, root in runs)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for ours, theirs in zip(expected, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        assert_close(torch.tensor(theirs), ours, 1e-4)


# -- evaluation, clipping, logs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluation_counts_policy_updates_alone_and_changes_nothing(tmp_path):
    evaluation, reward = JointEvaluation(interval=2), CountingReward()
    run = fit(tmp_path / "a", make_marlhf(), some_data(reward, eval_items=EVAL_ITEMS), [evaluation])
    first, second = (record.train_pairs for record in run[2].rounds)
    assert first == second == 3
    # Policy updates 0, 2, 4 and 6; three in each round.
    assert [step for step, _ in evaluation.results] == [0, first + 2, first + 3 + second + 1, run[0].global_step]
    assert reward.calls == 2 * ITEM_CALLS + 4
    assert_same_end(run, fit(tmp_path / "b", make_marlhf(), some_data(CountingReward())))


def test_fault_B71_B72_clipping_is_per_group(tmp_path):
    module, limit = make_marlhf(rl_algorithm="maac", advantage_normalization=False), 0.1
    *_, watch = fit(tmp_path, module, some_data(CountingReward()), gradient_clip_val=limit)
    assert {tuple(row) for row in watch.raw} == {("reward",), ("agent_0", "agent_1", "critic")}
    large = {name for row in watch.raw for name, value in row.items() if value > limit}
    assert large == {"agent_0", "agent_1", "critic", "reward"}
    expected = [{name: pytest.approx(min(norm, limit), rel=1e-4) for name, norm in row.items()} for row in watch.raw]
    assert watch.clipped == expected


@pytest.mark.slow
def test_fault_B37_everything_is_in_one_log(tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    data = some_data(CountingReward(), eval_items=EVAL_ITEMS)
    *_, watch = fit(tmp_path, make_marlhf(rl_algorithm="maac"), data, logger=loggers, log_every_n_steps=1)
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        rows = [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]

    def column(name):
        return [row[name] for row in rows if name in row]

    rollouts = [batch for batch in watch.batches if isinstance(batch, RolloutBatch)]
    pairs = [record.train_pairs for record in data.rounds]
    margins = column("reward/margin")
    assert len(margins) == sum(pairs)
    assert column("reward/loss") == pytest.approx([math.log1p(math.exp(-margin)) for margin in margins], abs=1e-5)
    assert column("reward/accuracy") == [float(margin > 0) for margin in margins]
    assert len(column("policy/loss")) == len(column("value/loss")) == len(rollouts)
    # A rollout of two items is learned from in two batches, and logged once.
    means = [(rollouts[i].rewards.mean() + rollouts[i + 1].rewards.mean()).item() / 2 for i in (0, 3)]
    assert column("turn_1/reward_mean")[::2] == pytest.approx(means, abs=1e-5)
    assert column("turn_1/expected_return") == column("turn_1/reward_mean")
    assert column("iter/current_iteration") == [1, 2]
    assert column("iter/train_preference_pairs") == column("iter/current_preference_pairs") == pairs
    assert column("iter/total_preference_pairs") == [pairs[0], sum(pairs)]
    assert column("eval/turn_1/reward_mean")
    # Of each round: three items, four candidates, two sides; then three items in two generations.
    assert column("env_step")[-1] == data.env_step == 2 * (3 * 4 * 2 + 3 * 2)
    assert column("env_step") == sorted(column("env_step"))
    board = EventAccumulator(loggers[1].log_dir).Reload()
    assert {name for row in rows for name in row} - {"step", "epoch"} <= set(board.Tags()["scalars"])
