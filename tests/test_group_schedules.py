"""Schedules per parameter group: numbers by hand, resting groups, restarts, checkpoints, and real Lightning runs."""

import io
import math
import warnings
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from helpers import assert_close
from pbrl_lightning.group_schedules import GroupSchedules

RATES = {"agent_0": 1e-3, "agent_1": 2e-3, "reward": 4e-3, "critic": 8e-3}
NAMES = list(RATES)
WARM_UP, TOTAL = 4, 20
pytestmark = [
    pytest.mark.filterwarnings("error:.*lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("error:.*optimizer.step.. has been overridden:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '?train_dataloader'? does not have many workers"),
]


def by_hand(rate, updates):
    """Warm-up over 4 updates from a quarter of the rate, then half a cosine over 16."""
    if updates < WARM_UP:
        return rate * (0.25 + 0.75 * updates / WARM_UP)
    return rate * 0.5 * (1 + math.cos(math.pi * (updates - WARM_UP) / (TOTAL - WARM_UP)))


def lambda_schedule(optimizer):
    return LambdaLR(optimizer, lambda updates: by_hand(1.0, updates))


def sequential(optimizer):
    warm_up = LinearLR(optimizer, start_factor=0.25, total_iters=WARM_UP)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, TOTAL - WARM_UP)], milestones=[WARM_UP])


class Halving:
    """A callable object, whose attributes a LambdaLR saves."""

    def __init__(self):
        self.factor, self.seen = 0.5, []

    def __call__(self, updates):
        self.seen.append(updates)
        return self.factor**updates


class WithFunction(ExponentialLR):
    """Keeps a function among its state, as a user's own schedule may."""

    def __init__(self, optimizer):
        self.shape, self.shapes = math.sqrt, [math.sqrt]
        super().__init__(optimizer, 0.9)


FACTORIES = {
    "lambda": lambda_schedule,
    "callable object": lambda optimizer: LambdaLR(optimizer, Halving()),
    "numpy": lambda optimizer: LambdaLR(optimizer, lambda updates: np.exp(-np.float64(updates))),
    "numpy single": lambda optimizer: LambdaLR(optimizer, lambda updates: np.float32(0.9) ** updates),
    "linear": partial(LinearLR, start_factor=0.5, total_iters=7),
    "cosine": partial(CosineAnnealingLR, T_max=6),
    "warm restarts": partial(CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "multi-step": partial(MultiStepLR, milestones=[2, 5, 5, 9]),
    "sequential": sequential,
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=40),
    "cyclic": partial(CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "own": WithFunction,
}


def make_optimizer(kind=AdamW, **options):
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate, "name": name} for name, rate in RATES.items()]
    return kind(groups, **options)


def update(optimizer, schedules, names=NAMES):
    """One update in which the named groups get a gradient; returns the rates that it used."""
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        if group["name"] in names:
            group["params"][0].sum().backward()
    used = rates_of(optimizer)
    optimizer.step()
    schedules.step()
    return used


def rates_of(optimizer):
    return {group["name"]: float(group["lr"]) for group in optimizer.param_groups}


def options_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# Schedules of groups that all take part


@pytest.mark.parametrize("factory", [lambda_schedule, sequential])
def test_every_group_follows_the_schedule_computed_by_hand(factory):
    optimizer = make_optimizer()
    schedules = GroupSchedules(optimizer, factory)
    assert schedules.get_last_lr() == [rate * 0.25 for rate in RATES.values()], "the first rate is set at once"
    for updates in range(TOTAL):
        for name, rate in update(optimizer, schedules).items():
            assert_close(torch.tensor(rate, dtype=torch.float64), by_hand(RATES[name], updates))
    assert_close(torch.tensor(schedules.get_last_lr(), dtype=torch.float64), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_groups_that_never_rest_are_scheduled_as_torch_does(name, kind):
    """Momenta too, which OneCycleLR and CyclicLR move."""
    ours, theirs = make_optimizer(kind), make_optimizer(kind)
    schedules, plain = GroupSchedules(ours, FACTORIES[name]), FACTORIES[name](theirs)
    for _ in range(12):
        assert options_of(ours) == options_of(theirs)
        update(ours, schedules)
        update(theirs, plain)
    assert schedules.get_last_lr() == plain.get_last_lr()


def test_construction_leaves_parameters_and_state_alone():
    optimizer = make_optimizer()
    schedules = GroupSchedules(optimizer, sequential)
    parameters = [group["params"][0] for group in optimizer.param_groups]
    update(optimizer, schedules)
    assert [group["params"][0] for group in optimizer.param_groups] == parameters
    assert set(optimizer.state) == set(parameters)
    assert schedules.optimizer is optimizer
    assert "step" not in vars(optimizer), "torch's schedules wrap the step of what they schedule"


def test_tensor_rates_stay_the_same_tensor():
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(1.0), "name": "agent_0"}]
    optimizer = AdamW(groups)
    rate = optimizer.param_groups[0]["lr"]
    schedules = GroupSchedules(optimizer, partial(ExponentialLR, gamma=0.5))
    update(optimizer, schedules)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    schedules.load_state_dict(through_a_file(schedules.state_dict()))
    update(optimizer, schedules)
    assert schedules.get_last_lr() == [0.25]
    schedules.restart("agent_0")
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 1.0


# Groups that rest, and restarts


@pytest.mark.parametrize("factory", [lambda_schedule, sequential])
def test_a_resting_group_stays_where_it_is(factory):
    optimizer = make_optimizer()
    schedules = GroupSchedules(optimizer, factory)
    counts = dict.fromkeys(NAMES, 0)
    turns = [["reward"], ["agent_0", "agent_1"], ["agent_1", "critic"], [], ["reward", "agent_0"]]
    for turn in turns * 4:
        used = update(optimizer, schedules, turn)
        for name in NAMES:
            expected = by_hand(RATES[name], counts[name])
            assert_close(torch.tensor(used[name], dtype=torch.float64), expected)
            counts[name] += name in turn
    assert counts == {"agent_0": 8, "agent_1": 8, "reward": 8, "critic": 4}


def test_one_parameter_with_a_gradient_is_enough():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = SGD([{"params": parameters, "lr": 1.0, "name": "critic"}])
    schedules = GroupSchedules(optimizer, partial(ExponentialLR, gamma=0.5))
    parameters[2].sum().backward()
    schedules.step()
    assert schedules.get_last_lr() == [0.5]
    optimizer.zero_grad(set_to_none=False)  # a gradient of zero is one: momentum and decay move the weights
    schedules.step(3.0)  # a metric, as Lightning may pass
    assert schedules.get_last_lr() == [0.25]
    optimizer.zero_grad()
    schedules.step()
    assert schedules.get_last_lr() == [0.25]


@pytest.mark.parametrize("name", FACTORIES)
def test_restart_begins_one_schedule_anew(name):
    optimizer = make_optimizer()
    schedules = GroupSchedules(optimizer, FACTORIES[name])
    first = options_of(optimizer)
    rounds = []
    for _ in range(2):
        rounds.append([update(optimizer, schedules)["reward"] for _ in range(7)])
        before = options_of(optimizer)
        schedules.restart("reward")
        after = options_of(optimizer)
        assert after[2] == first[2]
        assert after[:2] + after[3:] == before[:2] + before[3:]
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0])) > 2


# Checkpoints


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_loads_under_weights_only_and_continues_exactly(name):
    def start():
        optimizer = make_optimizer()
        return optimizer, GroupSchedules(optimizer, FACTORIES[name])

    def train(optimizer, schedules, begin, end):
        seen = []
        for step in range(begin, end):
            if step in (5, 13):
                schedules.restart("reward")
            update(optimizer, schedules, NAMES if step % 3 else NAMES[:2])
            seen.append((options_of(optimizer), schedules.get_last_lr()))
        return seen

    expected = train(*start(), 0, 18)
    optimizer, schedules = start()
    assert train(optimizer, schedules, 0, 9) == expected[:9]
    saved = {"optimizer": optimizer.state_dict(), "schedules": schedules.state_dict()}
    loaded = through_a_file(saved)
    resumed, continued = start()
    resumed.load_state_dict(loaded["optimizer"])  # in Lightning's order; it gives the optimizer new groups
    continued.load_state_dict(loaded["schedules"])
    assert train(resumed, continued, 9, 18) == expected[9:]
    again, repeated = start()
    again.load_state_dict(loaded["optimizer"])
    repeated.load_state_dict(loaded["schedules"])  # loading and training have not changed what was loaded
    assert train(again, repeated, 9, 18) == expected[9:]


@pytest.mark.parametrize("name", ["callable object", "sequential"])
def test_a_state_is_a_copy_and_holds_the_rates(name):
    optimizer = make_optimizer()
    schedules = GroupSchedules(optimizer, FACTORIES[name])
    for _ in range(6):
        update(optimizer, schedules)
    state = schedules.state_dict()
    saved, rates = through_a_file(state), rates_of(optimizer)
    for _ in range(6):
        update(optimizer, schedules)
    assert state == saved
    other = make_optimizer()
    GroupSchedules(other, FACTORIES[name]).load_state_dict(state)
    assert rates_of(other) == rates
    assert {name: group["lr"] for name, group in state["groups"].items()} == rates


@pytest.mark.parametrize(
    ("factory", "expected"),
    [(sequential, by_hand), (partial(ExponentialLR, gamma=0.5), lambda rate, updates: rate * 0.5**updates)],
    ids=["from initial_lr", "from lr"],
)
def test_the_rates_of_the_saved_run_win_over_new_ones(factory, expected):
    def start(factor):
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": factor * RATES[name], "name": name} for name in NAMES]
        optimizer = AdamW(groups)
        return optimizer, GroupSchedules(optimizer, factory)

    optimizer, schedules = start(1)
    for _ in range(6):
        update(optimizer, schedules)
    resumed, continued = start(10)
    resumed.load_state_dict(optimizer.state_dict())
    continued.load_state_dict(schedules.state_dict())
    continued.restart("reward")
    for updates in range(7):
        used = update(resumed, continued)
        for name, count in (("reward", updates), ("critic", 6 + updates)):
            assert_close(torch.tensor(used[name], dtype=torch.float64), expected(RATES[name], count))


# In Lightning


class FourGroups(L.LightningModule):
    """Rounds of 8 updates: 3 of the reward group, whose schedule restarts, then 5 of the others."""

    def __init__(self, factory):
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in NAMES})
        self.factory = factory
        self.used = []

    def turn(self, step):
        """Groups of an update; one of the agents rests in every other one."""
        return ["reward"] if step % 8 < 3 else ["critic", "agent_0"] + ["agent_1"] * (step % 2)

    def training_step(self, batch, batch_idx):
        names = self.turn(self.global_step)
        if batch_idx % self.trainer.accumulate_grad_batches:
            names = names[:1]  # the other groups have their gradient from the first of the accumulated batches
        factors = torch.arange(2.0).add(self.global_step).cos()  # a resumed plain loader need not give the same batch
        return sum((self.weights[name] * factors).sum() for name in names)

    def configure_optimizers(self):
        groups = [{"params": [self.weights[name]], "lr": rate, "name": name} for name, rate in RATES.items()]
        optimizer = AdamW(groups)
        schedules = GroupSchedules(optimizer, self.factory)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules, "interval": "step"}}

    def on_train_batch_start(self, batch, batch_idx):
        first = batch_idx % self.trainer.accumulate_grad_batches == 0
        if first and self.global_step and self.global_step % 8 == 0:
            self.lr_schedulers().restart("reward")

    def on_before_optimizer_step(self, optimizer):
        self.used.append(rates_of(optimizer))


def fit(module, root, steps, callbacks=(), checkpoint=None, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        **{**quiet, "enable_checkpointing": False, **options},
        accelerator="cpu",
        default_root_dir=root,
        max_steps=steps,
        max_epochs=-1,
        callbacks=list(callbacks),
    )
    # Ten batches an epoch: an even number, so that accumulation always ends with the second of two.
    loader = torch.utils.data.DataLoader(torch.zeros(10))
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
    return trainer


def expected_rates(module, steps):
    """The literal loop: each group counts its own updates, the reward group from each round's start."""
    counts = dict.fromkeys(NAMES, 0)
    rates = []
    for step in range(steps):
        if step % 8 == 0:
            counts["reward"] = 0
        rates.append({name: by_hand(RATES[name], counts[name]) for name in NAMES})
        for name in module.turn(step):
            counts[name] += 1
    return rates


def assert_rates(actual, expected):
    assert len(actual) == len(expected)
    table = [torch.tensor([[row[name] for name in NAMES] for row in rows]).double() for rows in (actual, expected)]
    assert_close(*table)


@pytest.mark.parametrize("factory", [lambda_schedule, sequential])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "clipped", "both"],
)
def test_a_lightning_run_counts_the_updates_of_each_group(factory, options, tmp_path):
    module = FourGroups(factory)
    fit(module, tmp_path, 20, **options)
    assert_rates(module.used, expected_rates(module, 20))


def test_the_gradients_of_an_update_are_there_when_lightning_steps_schedules(tmp_path):
    seen = []

    class Watching(FourGroups):
        def lr_scheduler_step(self, scheduler, metric):
            seen.append(sorted(name for name, weight in self.weights.items() if weight.grad is not None))
            super().lr_scheduler_step(scheduler, metric)

    module = Watching(sequential)
    fit(module, tmp_path, 12, accumulate_grad_batches=2)
    assert seen == [sorted(module.turn(step)) for step in range(12)]


def test_the_learning_rate_monitor_names_the_groups(tmp_path):
    monitor = LearningRateMonitor()
    module = FourGroups(sequential)
    fit(module, tmp_path, 6, [monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    logged = {name: monitor.lrs[f"lr-AdamW/{name}"] for name in NAMES}
    assert set(monitor.lrs) == {f"lr-AdamW/{name}" for name in NAMES}
    assert logged == {name: [row[name] for row in module.used] for name in NAMES}


@pytest.mark.parametrize("factory", [lambda_schedule, sequential])
def test_fault_B73_the_schedule_is_right_after_resume(factory, tmp_path):
    """Warm-up and cosine, stopped after 10 of 20 updates, in the middle of the second round's reward phase."""
    whole = FourGroups(factory)
    fit(whole, tmp_path, 20)
    stopped = FourGroups(factory)
    trainer = fit(stopped, tmp_path, 10)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    resumed = FourGroups(factory)
    fit(resumed, tmp_path, 20, checkpoint=tmp_path / "stopped.ckpt")
    assert_rates(whole.used, expected_rates(whole, 20))
    assert stopped.used == whole.used[:10]
    assert resumed.used == whole.used[10:]
    for name in NAMES:
        assert len({row[name] for row in resumed.used}) > 2, "the schedule moves"
        assert torch.equal(resumed.weights[name], whole.weights[name])


# What is refused


def test_groups_without_a_name_of_their_own_are_refused():
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"must have a `name` of its own, got \[None\]"):
        GroupSchedules(SGD([parameter], lr=1.0), sequential)
    twice = [{"params": [nn.Parameter(torch.ones(1))], "name": "critic"} for _ in range(2)]
    with pytest.raises(ValueError, match=r"got \['critic', 'critic'\]"):
        GroupSchedules(SGD(twice, lr=1.0), sequential)


def test_schedules_that_do_not_count_updates_are_refused():
    with pytest.raises(TypeError, match="ReduceLROnPlateau, which follows a metric, is not supported"):
        GroupSchedules(make_optimizer(), ReduceLROnPlateau)
    with pytest.raises(TypeError, match="must make a torch LRScheduler, got SGD"):
        GroupSchedules(make_optimizer(), lambda optimizer: make_optimizer(SGD))
    whole = make_optimizer()
    with pytest.raises(ValueError, match="the optimizer it is called with, but its ExponentialLR has another"):
        GroupSchedules(whole, lambda optimizer: ExponentialLR(whole, 0.9))


def test_unknown_groups_are_refused():
    schedules = GroupSchedules(make_optimizer(), sequential)
    with pytest.raises(ValueError, match="one of agent_0, agent_1, reward, critic, got 'rewards'"):
        schedules.restart("rewards")
    state = schedules.state_dict()
    del state["groups"]["critic"]
    with pytest.raises(ValueError, match="got agent_0, agent_1, reward; resume with the options"):
        schedules.load_state_dict(state)
    with pytest.raises(ValueError, match="got none"):
        schedules.load_state_dict(CosineAnnealingLR(make_optimizer(), 5).state_dict())


def test_no_warning_about_the_order_of_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = make_optimizer()
        schedules = GroupSchedules(optimizer, partial(CosineAnnealingLR, T_max=5))
        for _ in range(3):
            update(optimizer, schedules, ["reward"])
        schedules.restart("reward")
        update(optimizer, schedules)
