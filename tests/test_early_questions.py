"""Whoever asks for loaders, lengths or the number of steps before training begins changes nothing (B66)."""

from contextlib import suppress

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pbrl_lightning.early_loaders import batches_of_pairs, mean_length, most_pairs_of_item
from pbrl_lightning.utils.errors import RunError
from training_runs import (
    CountingReward,
    Killer,
    StopError,
    make_data,
    make_module,
    make_trainer,
    same_weights,
    weights_of,
)

ASKERS = ("schedule", "setup", "on_fit_start", "logger", "loader", "lengths")


class Asker(Callback):
    """Asks in one place, and remembers the answers; nothing is sampled or scored for one."""

    def __init__(self, where, reward):
        self.where, self.reward, self.answers = where, reward, []

    def ask(self, trainer):
        calls = self.reward.calls
        if self.where == "loader":
            loader = trainer.datamodule.train_dataloader()
            with pytest.raises(RunError, match="only when training has begun"):
                next(iter(loader))
            self.answers.append(len(loader))
        elif self.where == "lengths":
            trainer.fit_loop.setup_data()
            self.answers.append(trainer.num_training_batches)
        else:
            self.answers.append(trainer.estimated_stepping_batches)
        assert self.reward.calls == calls

    def setup(self, trainer, pl_module, stage):
        if self.where == "setup":
            self.ask(trainer)

    def on_fit_start(self, trainer, pl_module):
        if self.where in ("on_fit_start", "loader", "lengths"):
            self.ask(trainer)


class AskingLogger(CSVLogger):
    """Asks when it is given the model."""

    asker = trainer = None

    def log_graph(self, *args, **kwargs):
        self.asker.ask(self.trainer)


def run(root, where, iterative, stop=None, checkpoint=None):
    reward = CountingReward()
    asker = Asker(where, reward)
    saver = ModelCheckpoint(
        root, filename="{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
    )
    callbacks = [asker, saver, *([Killer(stop)] if stop else [])]
    options = {"max_epochs": None, "enable_checkpointing": True}
    logger = AskingLogger(root, name="csv", version="0") if where == "logger" else False
    trainer = make_trainer(root, callbacks, logger=logger, **options)
    module = make_module(rounds=2 if iterative else None, **({} if iterative else {"num_train_epochs": 2}))
    if where == "logger":
        logger.asker, logger.trainer = asker, trainer
    if where == "schedule":

        def schedule(optimizer):
            asker.ask(trainer)
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (asker.answers[-1] + 1))

        module.lr_scheduler = schedule
    data = make_data(reward, iterative=iterative, eval_items=None, replay_dir=str(root / "replay"))
    if checkpoint:
        data = make_data(reward, iterative=iterative, eval_items=None)
    with suppress(StopError):
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return weights_of(module.team), asker.answers, reward.calls, trainer.global_step


@pytest.fixture(scope="module")
def unasked(tmp_path_factory):
    """Runs of which nobody asks anything."""
    return {iterative: run(tmp_path_factory.mktemp("unasked"), "", iterative) for iterative in (False, True)}


@pytest.mark.parametrize("where", ASKERS)
@pytest.mark.parametrize(
    ("iterative", "stop"),
    [(False, 3), (True, 2), pytest.param(True, 5, marks=pytest.mark.slow)],
    ids=["base", "1", "2"],
)
def test_fault_B66_a_question_before_training_changes_no_run(tmp_path, unasked, where, iterative, stop):
    whole = unasked[iterative] if where != "schedule" else run(tmp_path / "whole", where, iterative)
    first = run(tmp_path / "run", where, iterative, stop)
    resumed = run(tmp_path / "run", where, iterative, checkpoint=str(tmp_path / "run" / f"{stop}.ckpt"))
    assert same_weights(resumed[0], whole[0])
    assert resumed[3] == whole[3]
    assert first[1]
    assert first[1] == resumed[1]
    assert first[2] + resumed[2] == whole[2]
    if where != "schedule":
        assert same_weights(run(tmp_path / "asked", where, iterative)[0], whole[0])


def test_the_estimate_is_that_of_a_run_in_which_no_comparison_is_a_tie(tmp_path):
    _, answers, _, steps = run(tmp_path, "on_fit_start", iterative=True)
    _, (batches,), _, _ = run(tmp_path / "2", "lengths", iterative=True)
    assert answers == [2 * batches]
    assert steps <= answers[0]


@pytest.mark.parametrize("limit", [None, 1, 3, 100])
def test_most_pairs_of_an_item_by_counting(limit):
    for candidates in range(1, 6):
        every = [(first, second) for first in range(candidates) for second in range(first)]
        assert most_pairs_of_item(candidates, limit, iterative=False) == len(every[:limit])
        assert most_pairs_of_item(candidates, limit, iterative=True) == len(list(range(candidates))[:limit])


def test_lengths_by_counting():
    assert [batches_of_pairs(pairs, 4, 2) for pairs in (0, 1, 8, 9, 16, 17)] == [0, 1, 1, 2, 2, 3]
    assert mean_length([(1, 5), (3, 2)]) == 3  # 11 batches of 4 epochs
    assert mean_length([(2, 7)]) == 7
