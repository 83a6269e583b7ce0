"""Lightning's callbacks, Trainer options and entry points: each has its documented effect, or is refused in a sentence.

`docs/lightning_features.md` holds the verdicts. What works is shown here, or in the test that the page names; what is
refused ends with the page's sentence.
"""

import csv
import inspect
import json
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.connector import _PRECISION_INPUT_STR
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers, plugins, profilers
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.callbacks.progress import ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import (
    AsyncCheckpointIO,
    BitsandbytesPrecision,
    MixedPrecision,
    TorchSyncBatchNorm,
    TransformerEnginePrecision,
)
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from pbrl_lightning import (
    JointRewardModel,
    JointRewardModule,
    MARLHFModule,
    MARLModule,
    PreferenceDataModule,
    ReferenceKL,
    ShardedStrategy,
)
from pbrl_lightning.callbacks import CollectionProgress, JointEvaluation
from pbrl_lightning.lightning_features import check_features
from pbrl_lightning.monitoring import metric_names
from pbrl_lightning.sharding import splits_weights
from pbrl_lightning.utils.errors import ConfigurationError
from training_runs import (
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

PAGE = Path(__file__).parent.parent / "docs" / "lightning_features.md"
REWARDS = {"winner_reward": 2.0, "loser_reward": 1.0, "candidate_reward_mean": 1.5}
PAIRS = [
    {"prompts": [p, p], "winner_completions": [w, w], "loser_completions": [v, v], **REWARDS}
    for p, w, v in zip("abcdef", "ghijkl", "mnopqr", strict=True)
]


def iterative(rounds=2):
    return make_module(make_team(True), rounds=rounds)


def fit(root, callbacks=(), module=None, data=None, **options):
    """A fitted trainer: 2 rounds, 5 and 6 updates."""
    trainer = make_trainer(directory(root), callbacks, **options)
    trainer.fit(module or iterative(), data or make_data())
    return trainer


def directory(root):
    """A new one below."""
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=root))


@pytest.fixture(autouse=True)
def no_leaked_processes():
    """What a strategy of several processes leaves behind."""
    with mock.patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def columns(root):
    """Names and last values of what a CSVLogger below a directory holds."""
    found = {}
    for path in Path(root).rglob("metrics.csv"):
        with path.open() as file:
            for row in csv.DictReader(file):
                found |= {name: float(value) for name, value in row.items() if value}
    return found


class Batches(Callback):
    """Epoch, pairs, scale, accumulation and first prompt of every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        prompts = batch.agents[0].input_ids[:, :8].tolist()
        self.seen.append(
            SimpleNamespace(epoch=trainer.current_epoch, batch=batch, ids=prompts, step=trainer.global_step)
        )

    def scales(self, epoch):
        """Of each batch: what the sum of its pairs' losses is multiplied by in an update."""
        return [round(s.batch.loss_scale, 9) for s in self.seen if s.epoch == epoch]


# -- the page --------------------------------------------------------------------------------------------------------


def rows(section):
    """Of a section of the page: name, verdict, sentence or note, and test of each row."""
    (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    table = {}
    for row in cells:
        assert len(row) == 4, row
        assert row[1] in ("works", "works, with a note", "refused"), row
        name = re.match(r"`([^`]*)`", row[0])[1]
        assert name not in table, f"{name} has two verdicts"
        table[name] = SimpleNamespace(verdict=row[1], text=row[2], test=row[3])
    return table


SECTIONS = {
    "Callbacks": lambda: set(lightning_callbacks.__all__),
    "Trainer options": lambda: set(inspect.signature(L.Trainer.__init__).parameters) - {"self"},
    "Entry points": lambda: (
        {f"Trainer.{n}" for n in ("fit", "validate", "test", "predict", "save_checkpoint", "init_module", "print")}
        | {f"Tuner.{name}" for name in vars(Tuner) if not name.startswith("_")}
        | {"Trainer.fit(module, loader)", "Trainer.fit(module, foreign data module)", "Trainer.fit(module)"}
        | {f"ckpt_path={path}" for path in ("PATH", "'last'", "'best'", "'hpc'", "'registry'")}
        | {"load_from_checkpoint", "torch.compile(module)", "module.compile()", "seed_everything"}
    ),
    "Strategies": lambda: set(StrategyRegistry.available_strategies()) | {"auto", "pbrl_lightning.ShardedStrategy"},
    "Precision": lambda: set(get_args(_PRECISION_INPUT_STR)),
    "Loggers": lambda: set(loggers.__all__) - {"Logger"},
    "Profilers": lambda: set(profilers.__all__) - {"Profiler"},
    "Plugins": lambda: set(plugins.__all__) - {"Precision", "CheckpointIO"},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_everything_that_lightning_has_is_on_the_page(section):
    assert set(rows(section)) == SECTIONS[section]()


def test_lightnings_trainer_has_no_other_entry_points():
    public = {name for name, value in vars(L.Trainer).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {f"Trainer.{name}" for name in public} <= set(rows("Entry points"))


def test_every_verdict_names_a_test_that_there_is():
    here = Path(__file__).parent
    for section in SECTIONS:
        for name, row in rows(section).items():
            if row.test == "not tried here":
                continue
            named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", row.test)
            assert named, f"{section}, {name}: {row.test}"
            for file, test in named:
                code = (here / (file or Path(__file__).name)).read_text()
                assert f"def {test}(" in code, f"{section}, {name}: {test}"


# -- what is refused -------------------------------------------------------------------------------------------------


class Freezing(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        raise AssertionError("called")


def with_option(**options):
    return lambda root: make_trainer(root, **options)


def with_callback(make):
    return lambda root: make_trainer(root, [make()])


def with_precision(kind):
    """A trainer with a precision whose package is not installed; only its kind is looked at."""

    def make(root):
        trainer = make_trainer(root)
        trainer.strategy._precision_plugin = kind.__new__(kind)
        return trainer

    return make


REFUSED = {
    ("Callbacks", "StochasticWeightAveraging"): with_callback(lambda: StochasticWeightAveraging(1e-3, 1)),
    ("Callbacks", "ModelPruning"): with_callback(lambda: ModelPruning("l1_unstructured", amount=0.5)),
    ("Callbacks", "BackboneFinetuning"): with_callback(lambda: BackboneFinetuning(1)),
    ("Callbacks", "BaseFinetuning"): with_callback(Freezing),
    ("Callbacks", "BatchSizeFinder"): with_callback(BatchSizeFinder),
    ("Callbacks", "LearningRateFinder"): with_callback(LearningRateFinder),
    ("Callbacks", "LearningRateMonitor"): with_callback(LearningRateMonitor),
    ("Callbacks", "DeviceStatsMonitor"): with_callback(DeviceStatsMonitor),
    ("Callbacks", "GradientAccumulationScheduler"): lambda root: make_trainer(
        root, [GradientAccumulationScheduler({0: 2})], accumulate_grad_batches=2
    ),
    ("Trainer options", "limit_val_batches"): with_option(limit_val_batches=2),
    ("Trainer options", "val_check_interval"): with_option(val_check_interval=2),
    ("Trainer options", "check_val_every_n_epoch"): with_option(check_val_every_n_epoch=2),
    ("Trainer options", "reload_dataloaders_every_n_epochs"): with_option(reload_dataloaders_every_n_epochs=3),
    ("Trainer options", "model_registry"): with_option(model_registry="organization/model"),
    ("Trainer options", "min_epochs"): with_option(min_epochs=9),
    ("Strategies", "fsdp"): with_option(strategy=ModelParallelStrategy(1, 1), devices=1),
    ("Precision", "transformer-engine"): with_precision(TransformerEnginePrecision),
    ("Plugins", "BitsandbytesPrecision"): with_precision(BitsandbytesPrecision),
}


@pytest.mark.parametrize(("section", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_refused(tmp_path, section, name):
    trainer = REFUSED[section, name](tmp_path)
    module = iterative()
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(module, make_data())
    assert rows(section)[name].text.endswith(str(refused.value))  # after what works, where something does
    assert module.team.counts == {}
    assert not list(tmp_path.iterdir())  # nothing was loaded, collected or written


def test_all_that_is_refused_is_named_at_once(tmp_path):
    trainer = make_trainer(tmp_path, [StochasticWeightAveraging(1e-3), EarlyStopping("loss")], val_check_interval=2)
    with pytest.raises(ConfigurationError, match=r"(?s)Stochastic.*val_check_interval.*monitor='loss'"):
        trainer.fit(iterative(), make_data())


def test_strategies_without_whole_weights():
    stage_3, stage_2 = (DeepSpeedStrategy.__new__(DeepSpeedStrategy) for _ in range(2))
    stage_3.config, stage_2.config = ({"zero_optimization": {"stage": stage}} for stage in (3, 2))
    for strategy in (FSDPStrategy.__new__(FSDPStrategy), ModelParallelStrategy(1, 1), stage_3):
        assert splits_weights(strategy)
    for strategy in (ShardedStrategy(), stage_2, SingleDeviceStrategy()):
        assert not splits_weights(strategy)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_find_unused_parameters_true"])
def test_one_process_of_ddp(tmp_path, strategy):
    module, plain = iterative(), iterative()
    fit(tmp_path / "ddp", (), module, strategy=strategy, devices=1, max_steps=2)
    fit(tmp_path / "plain", (), plain, max_steps=2)
    assert same_weights(weights_of(module.team), weights_of(plain.team))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_launchers_that_start_functions(tmp_path, strategy):
    module, plain = iterative(), iterative()
    make_trainer(tmp_path / "other", strategy=strategy, devices=1, max_steps=2).fit(module, make_data())
    fit(tmp_path / "plain", (), plain, max_steps=2)
    assert same_weights(weights_of(module.team), weights_of(plain.team))  # the agents came back


def test_weight_averaging_of_alternating_models_and_of_shares(tmp_path):
    module = MARLHFModule(make_team(True), num_iterations=1)
    with pytest.raises(ConfigurationError, match="would average a reward model and a team over each other's updates"):
        make_trainer(tmp_path, [EMAWeightAveraging()]).fit(module, make_data())
    with pytest.raises(ConfigurationError, match="`WeightAveraging` needs whole weights on every process"):
        fit(tmp_path, [WeightAveraging()], strategy=ShardedStrategy(), devices=1)


def test_a_tpu_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.strategy._accelerator = XLAAccelerator.__new__(XLAAccelerator)
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(iterative(), make_data())
    for section, name in (("Trainer options", "accelerator"), ("Strategies", "xla"), ("Plugins", "XLAPrecision")):
        assert rows(section)[name].text.endswith(str(refused.value))


# -- entry points ----------------------------------------------------------------------------------------------------


class Foreign(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader([1, 2])


@pytest.mark.parametrize("given", [(DataLoader([1, 2]),), (Foreign(),), (), (None, DataLoader([1]))])
@pytest.mark.parametrize("make", [iterative, lambda: JointRewardModule(JointRewardModel("builtin:tiny"))])
def test_batches_come_from_a_preference_data_module(tmp_path, given, make):
    module = make()
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(tmp_path).fit(module, *given)
    sentence = rows("Entry points")["Trainer.fit(module, loader)"].text
    assert sentence == str(refused.value).replace(type(module).__name__, "MADPOModule")


def test_a_loader_after_a_fit_with_a_data_module_is_refused_too(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(iterative(), make_data())
    for call in (trainer.fit, trainer.validate):
        with pytest.raises(ConfigurationError, match=rf"`trainer.{call.__name__}\(module, PreferenceDataModule"):
            call(iterative(), DataLoader([1]))


@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_compiled_modules_are_refused_and_left_as_they_were(tmp_path, how):
    module = iterative(1)
    given = torch.compile(module) if how == "torch.compile(module)" else module
    if given is module:
        module.compile()
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(tmp_path).fit(given, make_data())
    assert str(refused.value) == rows("Entry points")[how].text
    if given is not module:
        trainer = make_trainer(tmp_path, max_steps=1)
        trainer.fit(module, make_data())
        assert trainer.global_step == 1


def test_the_tuner_and_the_same_trainer_afterwards(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    for call, name in ((Tuner(trainer).scale_batch_size, "BatchSizeFinder"), (Tuner(trainer).lr_find, "LearningRate")):
        with pytest.raises(ConfigurationError, match=f"`{name}"):
            call(iterative(1), make_data())
    trainer.fit(iterative(1), make_data())
    assert trainer.global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize("as_callback", [False, True])
def test_the_learning_rate_finder_on_given_pairs(tmp_path, as_callback):
    options = {"early_stop_threshold": None, "min_lr": 1e-6}
    module, data = make_module(make_team(True), num_train_epochs=7), PreferenceDataModule(pairs=PAIRS)
    if as_callback:
        finder = LearningRateFinder(num_training_steps=20, **options)
        fit(tmp_path, [finder], module, data)
        found = finder.optimal_lr
    else:
        found = Tuner(make_trainer(tmp_path)).lr_find(module, data, num_training=20, **options)
        fit(tmp_path / "fit", (), module, data)
    assert len(found.results["lr"]) == 20
    assert module.learning_rate == found.suggestion() != 1e-3
    # The search left no trace but the rate.
    plain = make_module(make_team(True), num_train_epochs=7, learning_rate=found.suggestion())
    fit(tmp_path / "plain", (), plain, PreferenceDataModule(pairs=PAIRS))
    assert same_weights(weights_of(module.team), weights_of(plain.team))


@pytest.mark.parametrize("path", ["last", "best", "PATH"])
def test_resuming(tmp_path, path):
    whole = iterative()
    fit(tmp_path / "whole", (), whole)
    first = ModelCheckpoint(tmp_path / "saved", monitor="step", mode="max", save_last=True)
    # Another trainer looks for the newest `last.ckpt` where its ModelCheckpoint writes; `best` is the same trainer's.
    trainer = fit(tmp_path, [first], iterative(), max_epochs=1, enable_checkpointing=True)
    if path != "best":
        second = ModelCheckpoint(tmp_path / "saved", save_last=True)
        trainer = make_trainer(tmp_path, [second], enable_checkpointing=True)
    trainer.fit_loop.max_epochs = 2
    resumed = iterative()
    trainer.fit(resumed, make_data(), ckpt_path=first.last_model_path if path == "PATH" else path)
    assert trainer.global_step == 11
    assert same_weights(weights_of(resumed.team), weights_of(whole.team))


def test_save_checkpoint(tmp_path):
    module = iterative()
    trainer = fit(tmp_path, (), module, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    again = type(module).load_from_checkpoint(tmp_path / "by_hand.ckpt", team=make_team(True))
    assert same_weights(weights_of(module.team), weights_of(again.team))


def test_seed_everything_seeds_a_run_whose_data_module_has_no_seed(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert make_data().seed == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # put back after the test
    L.seed_everything(7, verbose=False)
    assert make_data().seed == 7
    assert make_data(seed=3).seed == 3
    for name, data in (("seeded", make_data()), ("given", make_data(seed=7)), ("other", make_data(seed=0))):
        make_trainer(tmp_path / name, max_steps=1).fit(iterative(), data)
    seeded, given, other = (round_files(tmp_path / name / "replay") for name in ("seeded", "given", "other"))
    assert seeded == given
    assert seeded != other


# -- monitors --------------------------------------------------------------------------------------------------------


class Names(Callback):
    """What could be monitored in the end, and what may be."""

    def on_train_end(self, trainer, pl_module):
        self.found = set(trainer.callback_metrics)
        self.expected = set(metric_names(pl_module, trainer.datamodule))


RUNS = {
    "madpo": (iterative, make_data),
    "madpo, given pairs": (
        lambda: make_module(make_team(True), num_train_epochs=1),
        lambda: PreferenceDataModule(pairs=PAIRS, eval_pairs=PAIRS[:2]),
    ),
    "reward model": (
        lambda: JointRewardModule(JointRewardModel("builtin:tiny")),
        lambda: PreferenceDataModule(pairs=PAIRS, val_fraction=0.4),
    ),
    "marl": (
        lambda: MARLModule(make_team(True), num_train_epochs=1, reference_kl=ReferenceKL(0.1)),
        lambda: make_data(iterative=False),
    ),
    "maac": (
        lambda: MARLModule(make_team(True), num_train_epochs=1, rl_algorithm="maac"),
        lambda: make_data(iterative=False, eval_items=None),
    ),
    "marlhf": (
        lambda: MARLHFModule(make_team(True), num_iterations=1, num_reward_epochs=1, num_train_epochs=1),
        make_data,
    ),
}


@pytest.mark.filterwarnings("ignore:no `eval_items`")
@pytest.mark.parametrize("run", RUNS)
def test_the_names_that_can_be_monitored_are_those_that_are_logged(tmp_path, run):
    module, data = RUNS[run]
    names = Names()
    evaluation = [] if run == "reward model" else [JointEvaluation(1)]
    fit(tmp_path, [*evaluation, names], module(), data())
    evaluations = {name for name in names.expected if name.startswith("eval/")}
    assert bool(evaluations) == (run in ("madpo", "marl", "marlhf"))
    assert {name for name in names.found if not name.startswith("time/")} == names.expected


@pytest.mark.parametrize(
    "name",
    ["collect/reward_mean", "iter/current_preference_pairs", "eval/turn_1/reward_mean", "train/loss", "env_step"],
)
def test_a_checkpoint_by_any_logged_name(tmp_path, name):
    best = ModelCheckpoint(tmp_path, monitor=name, mode="max", filename="{epoch}", save_top_k=2)
    stop = EarlyStopping(name, mode="max", patience=9)
    trainer = fit(tmp_path, [best, stop], enable_checkpointing=True)
    scores = [score.item() for score in best.best_k_models.values()]
    assert len(scores) == len(list(tmp_path.glob("epoch=*.ckpt"))) == 2
    assert trainer.callback_metrics[name].item() in scores  # of the second epoch
    assert stop.best_score.item() == best.best_model_score.item() == max(scores)


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_a_monitor_that_is_never_logged_is_refused_with_the_list(tmp_path, kind):
    callback = kind(monitor="train/los")
    expected = (
        rf"`{kind.__name__}\(monitor='train/los'\)` monitors what this run does not log "
        r"\(did you mean `train/loss`\?\); it can monitor train/loss, train/margin, .*collect/reward_mean.*"
        "eval/turn_1/reward_mean.*, and values per agent"
    )
    with pytest.raises(ConfigurationError, match=expected):
        fit(tmp_path, [callback], enable_checkpointing=True)


def test_evaluations_cannot_be_monitored_without_evaluation_items(tmp_path):
    with pytest.raises(ConfigurationError, match="`eval/…` needs `eval_items` and `reward_func`"):
        fit(tmp_path, [EarlyStopping("eval/turn_1/reward_mean")], data=make_data(eval_items=None))


def test_names_of_the_users_own_are_let_through(tmp_path):
    class Own(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log("own/number", 3.0)

    data = make_data(eval_metrics=lambda *c: {"letters": len(c[0])})
    best = ModelCheckpoint(tmp_path, monitor="own/number")
    letters = ModelCheckpoint(tmp_path, monitor="eval/letters")
    fit(tmp_path, [best, letters, Own()], data=data, enable_checkpointing=True)
    assert best.best_model_score.item() == 3.0
    assert letters.best_model_score.item() == 4.0


def test_fault_B114_a_monitored_evaluation_is_there_when_it_is_asked_for(tmp_path):
    evaluation = JointEvaluation(interval=0)  # first and last only, were it not monitored
    fit(tmp_path, [EarlyStopping("eval/turn_1/reward_mean", mode="max"), evaluation])
    assert [step for step, _ in evaluation.results] == [0, 5, 11]


def test_fault_B114_what_rollouts_log_is_not_there_after_a_reward_epoch(tmp_path):
    module, data = RUNS["marlhf"]
    with pytest.raises(ConfigurationError, match=r"asks after the first epoch of the reward model.*`strict=False`"):
        fit(tmp_path, [EarlyStopping("policy/loss")], module(), data())
    stop = EarlyStopping("policy/loss", strict=False)
    fit(tmp_path, [stop], module(), data())
    assert torch.isfinite(stop.best_score)


def test_fault_B114_what_was_logged_before_a_stop_is_there_after_it(tmp_path):
    saver = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(StopError):
        fit(tmp_path, [saver, Killer(8)], enable_checkpointing=True)
    best = ModelCheckpoint(tmp_path, monitor="collect/reward_mean", mode="max")
    trainer = make_trainer(tmp_path, [best, EarlyStopping("collect/reward_mean")], enable_checkpointing=True)
    trainer.fit(iterative(), make_data(), ckpt_path=tmp_path / "on_exception.ckpt")
    means = [record.reward_mean for record in trainer.datamodule.rounds]
    assert best.best_model_score.item() == pytest.approx(means[1])


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_early_stopping_and_min_epochs(tmp_path):
    for options, epochs in (({}, 1), ({"min_epochs": 2}, 2), ({"min_steps": 6}, 2)):
        stop = EarlyStopping("train/loss", stopping_threshold=1e6)
        trainer = fit(tmp_path, [stop], iterative(3), **options)
        assert trainer.current_epoch == epochs


@pytest.mark.slow
def test_callback_hooks_and_lambdas(tmp_path):
    starts, recorder = [], Recorder()
    fit(tmp_path, [recorder, LambdaCallback(on_train_epoch_start=lambda t, m: starts.append(t.global_step))])
    assert starts == [0, 5]
    assert recorder.events.count("batch") == 11


@pytest.mark.slow
def test_a_checkpoint_callback_of_the_users_own_takes_the_place_of_lightnings(tmp_path):
    class Own(Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"own_{trainer.current_epoch}.ckpt")

    fit(tmp_path, [Own()], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["own_0.ckpt", "own_1.ckpt"]
    assert not list(tmp_path.rglob("epoch=*"))


def test_monitors_of_rates_devices_and_throughput(tmp_path):
    throughput = ThroughputMonitor(len, length_fn=lambda batch: batch.agents[0].input_ids.shape[1])
    watching = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True), throughput]
    fit(tmp_path, watching, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    found = columns(tmp_path)
    assert found["lr-AdamW/agent_0"] == found["lr-AdamW/agent_1"] == 1e-3
    assert 0 <= found["DeviceStatsMonitor.on_train_batch_end/cpu_percent"] <= 100
    assert found["train/batches"] == 11
    assert found["train/samples"] > 11


@pytest.mark.parametrize(("schedule", "expected"), [({0: 1, 1: 2}, ([0.5] * 5, [0.5] * 6)), ({0: 2, 1: 1}, None)])
def test_the_accumulation_scheduler_weighs_every_pair_of_an_update_alike(tmp_path, schedule, expected):
    batches = Batches()
    trainer = fit(tmp_path, [GradientAccumulationScheduler(schedule), batches])
    # Times 1 / accumulation, which Lightning does, every pair of an update counts 1 / (pairs of the update).
    for epoch in (0, 1):
        accumulation = schedule[epoch]
        seen = [s for s in batches.seen if s.epoch == epoch]
        for start in range(0, len(seen), accumulation):
            update = seen[start : start + accumulation]
            pairs = sum(len(s.batch) for s in update)
            assert all(s.batch.loss_scale == pytest.approx(accumulation / pairs) for s in update)
    assert expected is None or (batches.scales(0), batches.scales(1)) == expected
    assert trainer.global_step == {1: 5 + 3, 2: 3 + 5}[schedule[0]]


@pytest.mark.slow
def test_an_exception_checkpoint_repeats_the_batch_that_was_interrupted(tmp_path):
    class Broken(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 10:  # the last batch of the last epoch
                raise StopError

    whole = iterative()
    fit(tmp_path / "whole", (), whole)
    for name, killer in (("between", Killer(7)), ("within", Broken())):
        with pytest.raises(StopError):
            fit(tmp_path / name, [OnExceptionCheckpoint(tmp_path / name), killer], enable_checkpointing=True)
        module = iterative()
        trainer = make_trainer(tmp_path / name)
        trainer.fit(module, make_data(), ckpt_path=tmp_path / name / "on_exception.ckpt")
        assert trainer.global_step == 11
        assert same_weights(weights_of(module.team), weights_of(whole.team))


@pytest.mark.parametrize("step", [1, 2])
def test_an_exception_checkpoint_within_a_rollout(tmp_path, step):
    """Of the second update of the first rollout, and of the first of the second one."""

    def run():
        return MARLModule(make_team(True), num_train_epochs=1, learning_rate=1e-3), make_data(
            iterative=False, items=[{"prompt": letter} for letter in "abcd"], train_batch_size=1
        )

    module, data = run()
    fit(tmp_path / "whole", (), module, data)
    broken, stopped = run()
    with pytest.raises(StopError):
        fit(tmp_path, [OnExceptionCheckpoint(tmp_path), Killer(step)], broken, stopped, enable_checkpointing=True)
    again, resumed = run()
    trainer = make_trainer(tmp_path / "again")
    trainer.fit(again, resumed, ckpt_path=tmp_path / "on_exception.ckpt")
    assert trainer.global_step == 4
    assert resumed.env_step == data.env_step
    assert same_weights(weights_of(again.team), weights_of(module.team))


def test_progress_bars_and_summaries(tmp_path, capsys):
    totals = {}

    class Bar(ProgressBar):
        def on_train_epoch_start(self, trainer, *_):
            totals[trainer.current_epoch] = self.total_train_batches

        def disable(self):
            pass

        def enable(self):
            pass

    class Summary(ModelSummary):
        @staticmethod
        def summarize(summary_data, total_parameters, trainable_parameters, *_, **__):
            totals["trainable"] = trainable_parameters

    module = iterative()
    fit(tmp_path, [Bar(), Summary(2)], module, enable_progress_bar=True, enable_model_summary=True)
    assert (totals[0], totals[1]) == (5, 6)
    assert totals["trainable"] == sum(v.numel() for agent in weights_of(module.team) for v in agent.values())


@pytest.mark.parametrize("name", ["TQDMProgressBar", "RichProgressBar"])
def test_progress_bars_of_both_kinds(tmp_path, name, capsys):
    if name == "RichProgressBar":
        pytest.importorskip("rich")
    bar = getattr(lightning_callbacks, name)()
    # Without a terminal plain lines take its place, unless they are switched off.
    fit(tmp_path, [bar, CollectionProgress(interval=0)], max_steps=2, enable_progress_bar=True)
    printed = capsys.readouterr()
    assert re.search(r"Epoch 0", printed.out + printed.err)


def test_the_rich_summary(tmp_path, capsys):
    pytest.importorskip("rich")
    fit(tmp_path, [lightning_callbacks.RichModelSummary(2)], max_steps=1, enable_model_summary=True)
    assert "AgentTeam" in capsys.readouterr().out


def test_a_spike_of_the_loss_ends_the_run(tmp_path):
    spikes = SpikeDetection(warmup=1, atol=0.0, exclude_batches_path=tmp_path / "skipped.json")
    with pytest.raises(Exception, match="Training spike detected in batch"):
        fit(tmp_path, [spikes])
    assert json.loads((tmp_path / "skipped.json").read_text())
    assert fit(tmp_path / "calm", [SpikeDetection(warmup=100)]).global_step == 11


def test_timers_stop_training_and_not_a_collection(tmp_path):
    for callbacks, options in (([Timer({"seconds": 0})], {}), ([], {"max_time": "00:00:00:00"})):
        recorder = Recorder()
        assert fit(tmp_path, [recorder, *callbacks], **options).global_step == 0
        assert recorder.events == ["start 1", "collected 1"]


def test_averaged_weights_are_what_is_evaluated_last_exported_and_saved(tmp_path):
    seen = []
    watch = LambdaCallback(on_train_batch_end=lambda t, m, *_: seen.append(weights_of(m.team)))
    module, evaluation = iterative(), JointEvaluation(interval=11)
    average = WeightAveraging()
    fit(tmp_path, [average, watch, evaluation], module)
    assert len(seen) == 11
    for agent, values in enumerate(weights_of(module.team)):
        for name, value in values.items():
            mean = torch.stack([weights[agent][name] for weights in seen]).mean(0)
            torch.testing.assert_close(value, mean, atol=1e-6, rtol=1e-5)
    assert [step for step, _ in evaluation.results] == [0, 11, 11]  # the last update's weights, and their average


@pytest.mark.slow
@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5)])
def test_averages_are_resumed_and_their_checkpoints_hold_nothing_frozen(tmp_path, make):
    whole = iterative()
    fit(tmp_path / "whole", [make()], whole)
    saver = ModelCheckpoint(tmp_path / "saved", filename="mid", every_n_train_steps=7, save_top_k=-1)
    fit(tmp_path, [make(), saver], max_steps=7, enable_checkpointing=True)
    saved = torch.load(tmp_path / "saved" / "mid.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == saved["current_model_state"].keys()
    assert all("lora_" in name for name in saved["state_dict"])
    resumed = iterative()
    fit_resumed = make_trainer(tmp_path / "resumed", [make()])
    fit_resumed.fit(resumed, make_data(), ckpt_path=tmp_path / "saved" / "mid.ckpt")
    assert same_weights(weights_of(resumed.team), weights_of(whole.team))


# -- Trainer options -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_limits_of_training(tmp_path):
    for options, steps in (
        ({"limit_train_batches": 2}, 4),
        ({"limit_train_batches": 0.5}, 4),
        ({"limit_train_batches": 0}, 0),
        ({"max_epochs": 1}, 5),
        ({"max_epochs": -1}, 11),
        ({"max_steps": 7}, 7),
        ({"fast_dev_run": 3}, 3),
    ):
        recorder = Recorder()
        trainer = fit(tmp_path / str(len(options)), [recorder], **options)
        assert trainer.global_step == recorder.events.count("batch") == steps, options


def test_a_limit_within_an_accumulated_update_weighs_its_pairs_alike(tmp_path):
    batches = Batches()
    trainer = fit(tmp_path, [batches], accumulate_grad_batches=2, limit_train_batches=3)
    assert trainer.global_step == 4
    assert batches.scales(0) == batches.scales(1) == [0.5, 0.5, 1.0]
    rollouts = Batches()
    module = MARLModule(make_team(True), num_train_epochs=1, num_generations=2)
    data = make_data(iterative=False, rollout_batch_size=1, items=[{"prompt": letter} for letter in "abcd"])
    fit(tmp_path, [rollouts], module, data, accumulate_grad_batches=2, limit_train_batches=3)
    assert rollouts.scales(0) == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("policy", [False, True])
def test_overfitting_repeats_the_same_batches(tmp_path, policy):
    batches = Batches()
    if policy:
        module = MARLModule(make_team(True), num_train_epochs=3, num_generations=2)
        data = make_data(iterative=False, rollout_batch_size=1)
    else:
        module = make_module(make_team(True), num_train_epochs=3)
        data = PreferenceDataModule(pairs=PAIRS)
    fit(tmp_path, [batches], module, data, overfit_batches=1)
    assert [s.epoch for s in batches.seen] == [0, 1, 2]
    prompts = {json.dumps([row[:1] for row in s.ids]) for s in batches.seen}
    assert len(prompts) == 1
    if not policy:
        assert len({json.dumps(s.ids) for s in batches.seen}) == 1


def test_validation_settings_work_where_there_is_validation(tmp_path):
    def validations(**options):
        seen = []
        watch = LambdaCallback(on_validation_batch_end=lambda t, *_: seen.append(t.global_step))
        module = make_module(make_team(True), num_train_epochs=2)
        fit(tmp_path, [watch], module, PreferenceDataModule(pairs=PAIRS[:4], eval_pairs=PAIRS[3:]), **options)
        return seen

    assert validations(num_sanity_val_steps=0) == [2, 2, 4, 4]
    assert validations(num_sanity_val_steps=1) == [0, 2, 2, 4, 4]
    assert validations(num_sanity_val_steps=0, limit_val_batches=1) == [2, 4]
    assert validations(num_sanity_val_steps=0, val_check_interval=1, limit_val_batches=1) == [1, 2, 3, 4]
    assert validations(num_sanity_val_steps=0, check_val_every_n_epoch=2) == [4, 4]


def test_limits_of_validate_and_no_evaluation(tmp_path):
    (whole,) = make_trainer(tmp_path).validate(iterative(), make_data())
    (part,) = make_trainer(tmp_path, limit_val_batches=1).validate(iterative(), make_data())
    assert (whole["eval/n"], part["eval/n"]) == (5.0, 2.0)
    trainer = fit(tmp_path, limit_val_batches=0, max_steps=1)
    assert not any(isinstance(callback, JointEvaluation) for callback in trainer.callbacks)


class Switches(Callback):
    """What a fit runs under."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.anomaly = torch.is_anomaly_enabled()
        self.benchmark = torch.backends.cudnn.benchmark
        self.inference = None

    def on_validation_batch_start(self, *_, **__):
        self.inference = torch.is_inference_mode_enabled()


@pytest.mark.slow
def test_switches_of_torch_change_no_result(tmp_path):
    plain = iterative()
    fit(tmp_path, (), plain, max_steps=2)
    for name in ("deterministic", "benchmark", "detect_anomaly"):
        switches, module = Switches(), iterative()
        try:
            fit(tmp_path, [switches], module, max_steps=2, **{name: True})
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = False
        assert getattr(switches, name.removeprefix("detect_"))
        assert same_weights(weights_of(module.team), weights_of(plain.team))


def test_inference_mode(tmp_path):
    for mode in (True, False):
        switches = Switches()
        make_trainer(tmp_path, [switches], inference_mode=mode).validate(iterative(), make_data())
        assert switches.inference is mode


def test_what_has_nothing_to_do_here_changes_nothing(tmp_path):
    plain = iterative()
    fit(tmp_path, (), plain, max_steps=2)
    options = {"sync_batchnorm": True, "use_distributed_sampler": False, "enable_autolog_hparams": False}
    options |= {"limit_test_batches": 1, "limit_predict_batches": 1, "num_nodes": 1, "devices": 1}
    module = iterative()
    fit(tmp_path, (), module, max_steps=2, reload_dataloaders_every_n_epochs=1, **options)
    assert same_weights(weights_of(module.team), weights_of(plain.team))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(tmp_path, algorithm):
    largest = []

    class Gradients(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            for group in optimizer.param_groups:
                grads = [p.grad.flatten() for p in group["params"] if p.grad is not None]
                if grads:
                    whole = torch.cat(grads)
                    largest.append((whole.norm() if algorithm == "norm" else whole.abs().max()).item())

    fit(tmp_path, [Gradients()], max_steps=2, gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm)
    assert largest
    assert max(largest) <= 1e-3 * (1 + 1e-4)


def test_barebones(tmp_path):
    bare, plain = iterative(), iterative()
    L.Trainer(barebones=True, accelerator="cpu", default_root_dir=tmp_path / "bare").fit(bare, make_data())
    fit(tmp_path, (), plain)
    assert same_weights(weights_of(bare.team), weights_of(plain.team))


def test_checkpoints_written_in_the_background(tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved", save_last=True)
    fit(tmp_path, [saver], enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    for name in ("round_0002.ckpt", "last.ckpt"):
        assert torch.load(tmp_path / "saved" / name, weights_only=True)["state_dict"]


def test_plugins_and_precision(tmp_path):
    for plugin in (MixedPrecision("bf16-mixed", "cpu"), TorchSyncBatchNorm()):
        assert fit(tmp_path, plugins=[plugin], max_steps=1).global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed"])
def test_precisions(tmp_path, precision):
    trainer = fit(tmp_path, precision=precision, max_steps=1)
    assert trainer.global_step == 1
    assert trainer.precision == ("bf16-mixed" if precision == "16-mixed" else precision)  # on a CPU


@pytest.mark.parametrize("name", ["simple", "advanced", pytest.param("pytorch", marks=pytest.mark.slow)])
def test_profilers(tmp_path, name):
    made = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}[name]
    profiler = getattr(profilers, made)(dirpath=tmp_path, filename="times")
    fit(tmp_path, profiler=profiler)
    wanted = "*.json" if name == "pytorch" else "*times*.txt"  # a trace, or a table
    assert any("optimizer" in path.read_text().lower() for path in tmp_path.rglob(wanted))


def test_loggers(tmp_path):
    writers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
    fit(tmp_path, logger=writers, log_every_n_steps=1, max_steps=2)
    assert columns(tmp_path)["train/loss"] > 0
    assert next((tmp_path / "board").rglob("events.*")).stat().st_size > 1000


def test_the_checks_ask_for_nothing_but_fits(tmp_path):
    """`validate` takes a Trainer whose callbacks a fit refuses."""
    trainer = make_trainer(tmp_path, [StochasticWeightAveraging(1e-3)], limit_val_batches=1)
    (found,) = trainer.validate(iterative(), make_data())
    assert found["eval/n"] == 2.0
    assert inspect.signature(check_features).parameters.keys() == {"trainer", "module"}


def test_init_module_and_print(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=1)
    with trainer.init_module():
        module = iterative(1)
    trainer.fit(module, make_data())
    plain = iterative(1)
    fit(tmp_path / "plain", (), plain, max_steps=1)
    assert same_weights(weights_of(module.team), weights_of(plain.team))
    trainer.print("a line")
    assert "a line" in capsys.readouterr().out


@pytest.mark.slow
def test_hpc_checkpoints(tmp_path):
    whole, module = iterative(), iterative()
    fit(tmp_path / "whole", (), whole)
    first = make_trainer(tmp_path, max_epochs=1)
    first.fit(iterative(), make_data())
    first.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    trainer = make_trainer(tmp_path)
    trainer.fit(module, make_data(), ckpt_path="hpc")
    assert trainer.global_step == 11
    assert same_weights(weights_of(module.team), weights_of(whole.team))


def test_a_registry_is_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="registry"):
        make_trainer(tmp_path).fit(iterative(), make_data(), ckpt_path="registry")


def test_test_and_predict(tmp_path):
    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            written.extend(predictions)

    written = []
    module, data = iterative(), make_data()
    trainer = make_trainer(tmp_path, [Writer("epoch")], limit_test_batches=1)
    (tested,) = trainer.test(module, data)
    (validated,) = make_trainer(tmp_path, limit_val_batches=1).validate(module, data)
    assert tested == validated
    predictions = trainer.predict(module, data)
    responses = [response for batch in predictions for item in batch for response in item]
    assert len(responses) == 5  # one to each evaluation item
    assert all(isinstance(text, str) and len(response) == 2 for response in responses for text in response)
    assert written == predictions
    limited = make_trainer(tmp_path, limit_predict_batches=1).predict(module, data)
    assert limited == predictions[:1]
