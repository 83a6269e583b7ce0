"""Where a round's time goes: counted once, complete, logged."""

import csv
import threading
import time

import pytest
from lightning.pytorch.loggers import CSVLogger

from pbrl_lightning import (
    CurrentComparator,
    JointRewardModel,
    JointRewardModule,
    MARLHFModule,
    PreferenceDataModule,
    PreferencePair,
    timing,
)
from pbrl_lightning.callbacks import JointEvaluation
from pbrl_lightning.preferences.round_files import write_round_file
from pbrl_lightning.timing import ACTIVITIES, Stopwatch, spending, take_seconds
from training_runs import make_data, make_module, make_team, make_trainer, text_reward


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when told to."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    take_seconds()

    def wait(seconds):
        now[0] += seconds

    return wait


def taken():
    return {name: seconds for name, seconds in take_seconds().items() if seconds}


def test_time_counts_for_the_innermost_activity_alone(clock):
    clock(50)  # nobody's
    with spending("tokenising"):
        clock(1)
        with spending("sampling"):
            clock(2)
            with spending("saving"):
                clock(4)
            clock(8)
        clock(16)
        assert taken() == {"tokenising": 17, "sampling": 10, "saving": 4}
        clock(5)  # goes on after having been asked
    clock(50)
    assert taken() == {"tokenising": 5}
    assert taken() == {}


def test_an_evaluation_keeps_its_own_sampling_and_an_error_ends_what_it_ends(clock):
    @spending("sampling")
    def sample():
        clock(2)
        raise LookupError("gone")

    with spending("evaluating"):
        clock(1)
        with pytest.raises(LookupError, match="gone"):
            sample()
    with pytest.raises(LookupError, match="gone"):
        sample()
    clock(9)
    assert taken() == {"evaluating": 3, "sampling": 2}


def test_what_is_counted_between_two_hooks_is_not_counted_again(clock):
    watch = Stopwatch()
    clock(3)
    with spending("evaluating"):
        clock(10)
    clock(4)
    assert watch.stop("training") == 7
    assert taken() == {"training": 7, "evaluating": 10}


def test_only_the_main_thread_counts(clock):
    def write():
        with spending("saving"):
            clock(5)

    with spending("sampling"):
        other = threading.Thread(target=write)
        other.start()
        other.join()
    assert taken() == {"sampling": 5}


def times_of(root):
    """The rows of ``time/*`` that a run logged."""
    with open(next(root.rglob("metrics.csv")), encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("time/round")]
    return [{name[5:]: float(value) for name, value in row.items() if name.startswith("time/")} for row in rows]


def check(rows, expected, some):
    assert len(rows) == expected
    for row in rows:
        assert set(row) == {*ACTIVITIES, "round", "other"}
        parts = sum(row[name] for name in ACTIVITIES)
        assert row["round"] == pytest.approx(parts + row["other"], abs=1e-6)  # `other` is not below 0
        assert all(row[name] > 0 for name in some), row


def slow_reward(*completions):
    time.sleep(0.2)
    return text_reward(*completions)


@pytest.mark.slow
def test_each_round_of_an_iterative_run_logs_its_time(tmp_path):
    team = make_team()
    data = make_data(slow_reward)
    options = {"max_epochs": -1, "logger": CSVLogger(tmp_path), "enable_checkpointing": True}
    make_trainer(tmp_path, [JointEvaluation(interval=1)], **options).fit(make_module(team, 2), data)
    rows = times_of(tmp_path)
    check(rows, 2, ("sampling", "scoring", "tokenising", "training", "saving"))
    for row in rows:
        # The reward sleeps in every evaluation, within the hooks of a training step.
        assert row["evaluating"] > 0.2
        assert row["training"] < row["round"] - row["evaluating"] - row["scoring"]
        # Three items, actors and comparator in one call each: the reward sleeps for most of the round.
        assert 0.2 <= row["scoring"] < row["round"]


def test_marlhf_counts_rollouts_and_both_phases(tmp_path):
    team = make_team()
    module = MARLHFModule(team, num_iterations=2, num_reward_epochs=1, num_train_epochs=1)
    data = make_data(comparator=CurrentComparator(), rollout_batch_size=2)
    make_trainer(tmp_path, max_epochs=-1, logger=CSVLogger(tmp_path)).fit(module, data)
    check(times_of(tmp_path), 2, ("sampling", "scoring", "tokenising", "training"))


def test_fitting_a_reward_model_alone_logs_its_time(tmp_path):
    pairs = tmp_path / "pairs.json"
    sides = [PreferencePair([prompt] * 2, ["a", "b"], ["c", "d"], 1.0, 0.0, 0.5) for prompt in "xyz"]
    write_round_file(pairs, 1, sides)
    module = JointRewardModule(JointRewardModel("builtin:tiny"), num_train_epochs=1)
    make_trainer(tmp_path, logger=CSVLogger(tmp_path)).fit(module, PreferenceDataModule(pairs=[str(pairs)]))
    check(times_of(tmp_path), 1, ("tokenising", "training"))
