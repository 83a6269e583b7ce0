"""One directory per run: with any logger, several or none; resumed runs; the options that loggers get."""

import csv
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import pbrl_lightning
from pbrl_lightning import (
    ApiEndpoint,
    CurrentComparator,
    HistoryComparator,
    JointRewardModel,
    JointRewardModule,
    LoraOptions,
    MADPOModule,
    MARLHFModule,
    PreferenceDataModule,
    ScoreJudge,
)
from pbrl_lightning.callbacks import AgentExport, RewardDistribution, RunDirectory
from pbrl_lightning.callbacks.run_directory import parts_elsewhere, where
from pbrl_lightning.cli import main
from pbrl_lightning.collecting import PreferenceTrainer
from pbrl_lightning.hyperparameters import run_options
from pbrl_lightning.preferences.round_files import ForeignReplayError
from pbrl_lightning.reporting.runs import read_run
from pbrl_lightning.run_directory import _decide, name_of_directory, run_directory
from pbrl_lightning.utils.errors import ConfigurationError
from pbrl_lightning.utils.options import MASKED, encode, given_options, is_plain
from training_runs import ITEMS, SAMPLING, make_data, make_module, make_team, text_reward

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PARTS = {"checkpoints", "export", "hparams.yaml", "replay"}
CONFIG = str(Path(__file__).parent.parent / "configs/debug/madpo_iter.yaml")
KEY = "sk-canary0123456789"


class Stub(Logger):
    """What loggers of services have: a project, an id, a place that all runs share; it remembers what it gets."""

    def __init__(self, save_dir=None, name="project", version=None):
        self._save_dir, self._name, self._version = save_dir, name, version
        self.options, self.metrics = {}, []

    @property
    def save_dir(self):
        return self._save_dir

    @property
    def name(self):
        return self._name

    @property
    def version(self):
        return self._version

    def log_hyperparams(self, params):
        self.options.update(params)

    def log_metrics(self, metrics, step=None):
        self.metrics.append(metrics)


class Late(Stub):
    """An id that exists once the experiment does, as with Weights & Biases."""

    count = 0

    @property
    def experiment(self):
        if self._version is None:
            Late.count += 1
            self._version = f"id{Late.count}"
        return self


def trainer_of(root, kind=L.Trainer, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return kind(accelerator="cpu", default_root_dir=root, **{**quiet, **options})


def fit(trainer, rounds=1, **options):
    data = make_data(comparator=CurrentComparator(), eval_items=None)
    trainer.fit(make_module(rounds=rounds), data, **options)
    return run_directory(trainer)


def contents(directory):
    return {path.name for path in directory.iterdir()}


LOGGERS = {
    "none": lambda root: False,
    "service": lambda root: Late(str(root / "shared")),
    "remote": lambda root: Late(None),
    "no id": lambda root: Stub(str(root / "shared")),
    "numbered": lambda root: Stub(str(root / "shared"), version=len(list((root / "shared").glob("project/*")))),
    "service and csv": lambda root: [Late(str(root / "shared")), CSVLogger(root / "csv")],
    "csv and service": lambda root: [CSVLogger(root / "csv"), Late(str(root / "shared"))],
    "tensorboard": lambda root: TensorBoardLogger(root / "tb", name="mine"),
    "sub_dir": lambda root: TensorBoardLogger(root / "tb", name="mine", sub_dir="logs"),
}
PLACES = {
    "none": ("lightning_logs/version_0", "lightning_logs/version_1"),
    "service": ("shared/project/id1", "shared/project/id2"),
    "remote": ("project/id1", "project/id2"),
    "no id": ("lightning_logs/version_0", "lightning_logs/version_1"),
    "numbered": ("shared/project/version_0", "shared/project/version_1"),
    "service and csv": ("csv/lightning_logs/version_0", "csv/lightning_logs/version_1"),
    "csv and service": ("csv/lightning_logs/version_0", "csv/lightning_logs/version_1"),
    "tensorboard": ("tb/mine/version_0", "tb/mine/version_1"),
    "sub_dir": ("tb/mine/version_0/logs", "tb/mine/version_1/logs"),
}


@pytest.mark.parametrize("kind", LOGGERS)
def test_two_runs_stand_in_directories_of_their_own(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Late, "count", 0)
    found = [fit(trainer_of(tmp_path, logger=LOGGERS[kind](tmp_path))) for _ in range(2)]
    assert [str(directory.relative_to(tmp_path)) for directory in found] == list(PLACES[kind])
    for directory in found:
        assert contents(directory) >= PARTS - ({"checkpoints"} if kind == "sub_dir" else set())
        assert list(directory.glob("report.html")) or kind == "none"  # runs without a logger get none
        assert any((directory.parent if kind == "sub_dir" else directory).glob("checkpoints/*.ckpt"))
    # Nothing is left between them.
    kept = {"csv", "shared", "tb", "lightning_logs", "project"}
    assert contents(tmp_path) <= kept
    owners = {json.loads((directory / "replay/run.json").read_text())["run_id"] for directory in found}
    assert len(owners) == 2


def test_two_fits_of_one_trainer_have_directories_of_their_own(tmp_path):
    trainer = trainer_of(tmp_path)
    first = fit(trainer)
    trainer.fit_loop.epoch_progress.reset()
    second = fit(trainer)
    assert [path.name for path in (first, second)] == ["version_0", "version_1"]
    assert Path(trainer.checkpoint_callback.dirpath) == second / "checkpoints"


def test_runs_that_start_together_have_different_directories(tmp_path):
    trainers = [trainer_of(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = [directory for directory, _ in pool.map(_decide, trainers)]
    assert len(set(found)) == 8
    assert sorted(path.name for path in found) == [f"version_{number}" for number in range(8)]


def test_a_trial_run_makes_no_directory(tmp_path):
    fit(trainer_of(tmp_path, fast_dev_run=True))
    assert not contents(tmp_path)


def test_a_named_run(tmp_path):
    trainer = trainer_of(tmp_path, PreferenceTrainer, run_name="long")
    assert fit(trainer) == tmp_path / "long" / "version_0"
    trainer = trainer_of(tmp_path, PreferenceTrainer, run_name="long", logger=True)
    assert fit(trainer) == tmp_path / "long" / "version_1"
    assert name_of_directory(tmp_path / "long" / "version_1") == "long/version_1"
    own = trainer_of(tmp_path, PreferenceTrainer, run_name="long", logger=CSVLogger(tmp_path, name="mine"))
    assert run_directory(own) == tmp_path / "mine" / "version_0"
    for wrong in ("", "a/b", "..", "a b"):
        with pytest.raises(ConfigurationError, match="`run_name` must be letters, digits"):
            PreferenceTrainer(run_name=wrong)


def test_collecting_and_validating_have_a_directory_too(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, PreferenceTrainer)
    trainer.collect(make_module(rounds=1), make_data(comparator=CurrentComparator()))
    assert (tmp_path / "lightning_logs/version_0/replay/iteration_0001.json").is_file()
    monkeypatch.chdir(tmp_path)
    main(["validate", "--config", CONFIG, "--trainer.logger", "false", "--trainer.default_root_dir", "v"])
    assert contents(tmp_path / "v/lightning_logs/version_0") == {"config_validate.yaml"}


def test_what_lies_elsewhere_is_said(tmp_path):
    callbacks = [
        AgentExport(str(tmp_path / "models")),
        RewardDistribution(str(tmp_path / "rewards")),
        ModelCheckpoint(tmp_path / "saved"),
    ]
    loggers = [TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")]
    trainer = trainer_of(tmp_path, callbacks=callbacks, logger=loggers)
    data = make_data(comparator=HistoryComparator(), eval_items=None, replay_dir=str(tmp_path / "pairs"))
    trainer.fit(make_module(rounds=1), data)
    directory = tmp_path / "tb/lightning_logs/version_0"
    assert parts_elsewhere(trainer) == {
        "checkpoints": tmp_path / "saved",
        "logs of the CSVLogger": tmp_path / "csv/lightning_logs/version_0",
        "round files": tmp_path / "pairs",
        "trained models": tmp_path / "models",
        "reward distributions": tmp_path / "rewards",
    }
    lines = where(trainer)
    assert lines[0] == f"run directory: {directory}  (tensorboard --logdir {directory})"
    assert f"  round files: {tmp_path / 'pairs'}" in lines
    assert f"round files: {tmp_path / 'pairs'}" in (directory / "report.html").read_text(encoding="utf-8")


# -- resumed runs --------------------------------------------------------------------------------------------------


def test_a_resumed_run_without_a_logger_continues_in_its_directory(tmp_path):
    first = trainer_of(tmp_path, max_steps=2)
    directory = fit(first, rounds=2)
    checkpoint = first.checkpoint_callback.last_model_path or str(next(directory.glob("checkpoints/*.ckpt")))
    second = trainer_of(tmp_path)
    assert fit(second, rounds=2, ckpt_path=checkpoint) == directory
    assert contents(tmp_path / "lightning_logs") == {"version_0"}
    assert Path(second.checkpoint_callback.dirpath) == directory / "checkpoints"
    assert "iteration_0002.json" in contents(directory / "replay")
    assert parts_elsewhere(second) == {}


def test_a_checkpoint_from_elsewhere_takes_no_run_to_its_place(tmp_path):
    directory = fit(trainer_of(tmp_path / "one", max_steps=2), rounds=2)
    checkpoint = str(next(directory.glob("checkpoints/*.ckpt")))
    trainer = trainer_of(tmp_path / "two")
    assert fit(trainer, rounds=2, ckpt_path=checkpoint) == tmp_path / "two/lightning_logs/version_0"
    assert f"  earlier part of the run, with its logs: {directory}" in where(trainer)
    assert parts_elsewhere(trainer)["round files"] == directory / "replay"  # its own run's


def run(*options):
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    main(["fit", "--config", CONFIG, "--trainer.default_root_dir", "runs", *quiet, *options])


def rounds(number):
    return "--model.init_args.num_iterations", str(number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensorboard", "csv", "none"])
def test_a_run_that_the_command_line_resumes_continues_in_its_directory_with_its_logs(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("csv.yaml").write_text(
        "trainer: {logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs}}}"
    )
    logger = {"csv": ("--config", "csv.yaml"), "none": ("--trainer.logger", "false"), "tensorboard": ()}[kind]
    directory = Path("runs/lightning_logs/version_0")
    run(*logger, *rounds(1))
    before = read_run(directory).series
    run(*logger, *rounds(2), "--ckpt_path", str(directory))
    assert contents(Path("runs/lightning_logs")) == {"version_0"}
    assert {"config.yaml", "config_1.yaml", "export"} <= contents(directory)
    assert yaml.safe_load((directory / "hparams.yaml").read_text())["module"]["num_iterations"] == 2
    if kind != "none":
        after = read_run(directory).series
        first, whole = before["train/loss"], after["train/loss"]
        assert whole.values[: len(first.values)] == first.values  # nothing is lost
        assert len(whole.values) > len(first.values)
        assert after["iter/current_iteration"].values == [1.0, 2.0]
    if kind == "tensorboard":  # with another root it begins a new directory
        run(*rounds(3), "--ckpt_path", str(directory), "--trainer.default_root_dir", "other")
        assert contents(Path("other/lightning_logs")) == {"version_0"}


def test_a_run_that_python_resumes_with_the_version_of_its_csv_logger_keeps_its_rows(tmp_path):
    options = {"log_every_n_steps": 1, "enable_checkpointing": True}
    first = fit(trainer_of(tmp_path, logger=CSVLogger(tmp_path, name="csv", version=0), **options))
    before = read_run(first).series["train/loss"].values
    checkpoint = str(next(first.glob("checkpoints/*.ckpt")))
    trainer = trainer_of(tmp_path, logger=CSVLogger(tmp_path, name="csv", version=0), **options)
    assert fit(trainer, rounds=2, ckpt_path=checkpoint, weights_only=True) == first
    after = read_run(first).series["train/loss"].values
    assert after[: len(before)] == before
    assert len(after) > len(before) > 0
    again = trainer_of(tmp_path, logger=CSVLogger(tmp_path, name="csv", version=0), **options)
    with pytest.raises(ForeignReplayError):  # another run cannot have the directory, and costs no row
        fit(again)
    with (first / "metrics_1.csv").open() as file:
        assert len([row for row in csv.DictReader(file) if row["train/loss"]]) == len(after)


def test_rows_of_a_csv_logger_survive_a_kill_while_it_opens(tmp_path):
    (tmp_path / "metrics_earlier.csv").write_text("a,step\n1.0,3\n")
    (tmp_path / "metrics.csv").write_text("a,step\n2.0,4\n")
    assert read_run(tmp_path).series["a"].values == [1.0, 2.0]


# -- options in logs -----------------------------------------------------------------------------------------------


def test_the_options_of_a_run(tmp_path):
    stub = Late(str(tmp_path))
    loggers = [TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv"), stub]
    trainer = trainer_of(tmp_path, logger=loggers, log_every_n_steps=1)
    team = make_team(lora=True, formatters="Say {prompt}")
    trainer.fit(make_module(team, rounds=1), make_data(comparator=HistoryComparator(k=2)))
    saved = yaml.safe_load((run_directory(trainer) / "hparams.yaml").read_text())
    assert saved == yaml.safe_load((Path(loggers[1].log_dir) / "hparams.yaml").read_text()) == stub.options
    assert saved["module"]["class"] == "MADPOModule"
    assert saved["module"]["learning_rate"] == 1e-3
    assert saved["team"]["lora"] == {
        "class": "LoraOptions", "r": 4, "alpha": 32, "target_modules": None, "lora_dropout": 0.0
    }  # fmt: skip
    assert saved["team"]["formatters"] == "Say {prompt}"
    data = saved["data"]
    assert data["reward_func"] == "training_runs:text_reward"
    assert (data["items"], data["eval_items"]) == ("3 given in Python", "5 given in Python")
    assert (data["comparator"]["class"], data["comparator"]["k"]) == ("HistoryComparator", 2)
    assert data["pairs_per_sample"] == 4  # the default that was chosen
    assert is_plain(saved)

    events = EventAccumulator(loggers[0].log_dir)
    events.Reload()
    read = {
        name: HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content)
        for name in ("experiment", "session_start_info")
    }
    shown = read["session_start_info"].session_start_info.hparams
    assert shown["module/learning_rate"].number_value == 1e-3
    assert shown["data/comparator/class"].string_value == "HistoryComparator"
    metrics = [info.name.tag for info in read["experiment"].experiment.metric_infos]
    assert metrics == ["eval/turn_1/reward_mean", "train/loss", "train/preference_accuracy"]
    assert set(metrics) <= set(events.Tags()["scalars"])
    assert "hp_metric" not in events.Tags()["scalars"]
    evaluated = [event.value for event in events.Scalars("eval/turn_1/reward_mean")]
    assert evaluated == pytest.approx([m["eval/turn_1/reward_mean"] for m in stub.metrics if metrics[0] in m])


class Keyed:
    """A reward that was given a key."""

    def __init__(self, api_key, token="", headers=None, size=3):
        self.api_key, self.token, self.headers, self.size = api_key, token, headers, size

    def __call__(self, *completions):
        return text_reward(*completions)


def test_no_key_is_in_any_file_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stub = Late(str(tmp_path))
    trainer = trainer_of(tmp_path, logger=[TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv"), stub])
    reward = Keyed(KEY, KEY, {"X-Team": KEY, "X-Env": "${OPENAI_API_KEY}"})
    trainer.fit(make_module(rounds=1), make_data(reward, eval_items=None, comparator=CurrentComparator()))
    assert stub.options["data"]["reward_func"] == {
        "class": "Keyed",
        "api_key": MASKED,
        "token": MASKED,
        "headers": {"X-Team": MASKED, "X-Env": "${OPENAI_API_KEY}"},
        "size": 3,
    }
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", "abc"),
        ("hub_token", "abc"),
        ("password", "abc"),
        ("url", "https://me:secret@host/v1"),
        ("criteria", f"use {KEY}"),
        ("header", "Bearer abcdef"),
    ],
)
def test_values_that_may_be_keys_are_not_shown(name, value):
    assert encode({name: value}) == {name: {"left_out": MASKED}}


def test_values_that_are_no_keys_are_shown():
    options = {"key_env": "OPENAI_API_KEY", "max_new_tokens": 4, "token_budget": 7, "url": "https://host/v1", "key": ""}
    assert encode(options) == options


def examples():
    """An object of each public class with options, none of them at its default."""
    endpoint = ApiEndpoint("https://host/v1", model="m")
    return {
        "LoraOptions": {"r": 3}, "SamplingConfig": {"temperature": 0.5}, "ChatTemplate": {"user": "{prompt}!"},
        "PromptTemplate": {"text": "{prompt}?"}, "ReferenceKL": {"coef": 0.3}, "HistoryComparator": {"k": 3},
        "CurrentComparator": {"num_candidates": 5}, "CurrentCopyComparator": {"devices": ["cpu"]},
        "ModelComparator": {"models": "builtin:tiny"}, "ApiComparator": {"endpoint": endpoint},
        "ApiEndpoint": {"url": "https://host/v1"}, "LambdaDecayReplay": {"decay": 0.25}, "NearestKReplay": {"k": 2},
        "AllHistoryReplay": {"sample_size": 3}, "CurrentReplay": {}, "TagAdapter": {}, "AttachedCritics": {"seed": 3},
        "JointCritic": {"max_length": 9}, "SeparateCritics": {"max_length": 9}, "JointRewardModel": {"max_length": 9},
        "ScoreJudge": {"endpoint": endpoint, "criteria": "good"},
        "PairwiseJudge": {"endpoint": endpoint, "criteria": "good"}, "CentralizedGeneration": {},
        "AgentTeam": {"models": "builtin:tiny", "num_agents": 2}, "MADPOModule": {"team": make_team(), "dpo_beta": 0.3},
        "MARLModule": {"team": make_team(), "num_generations": 3},
        "MARLHFModule": {"team": make_team(), "num_reward_epochs": 3},
        "JointRewardModule": {"reward_model": JointRewardModel("builtin:tiny"), "learning_rate": 0.3},
        "PreferenceDataModule": {"items": ITEMS, "reward_func": text_reward, "sampling": SAMPLING},
    }  # fmt: skip


def test_every_option_of_every_public_class_is_kept():
    abstract = {"Comparator", "JointAdapter", "PreferenceJudge", "ReplayBuffer"}
    others = {"PairBatch", "PreferencePair", "RolloutBatch", "ShardedStrategy"}  # data, and Lightning's
    public = {name for name in pbrl_lightning.__all__ if inspect.isclass(getattr(pbrl_lightning, name))}
    given = examples()
    assert set(given) == public - abstract - others
    for name, options in given.items():
        kind = getattr(pbrl_lightning, name)
        kept = given_options(kind(**options))
        parameters = [p for p in inspect.signature(kind.__init__).parameters.values() if p.name != "self"]
        assert set(kept) == {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}, name
        assert {key: kept[key] for key in options} == options, name
        encoded = encode(kind(**options))
        json.dumps(encoded)
        assert encoded["class_path"] == f"pbrl_lightning:{name}"


def test_options_of_a_reward_model_and_of_both_stages(tmp_path):
    trainer = trainer_of(tmp_path)
    reward = JointRewardModule(JointRewardModel("builtin:tiny", lora=LoraOptions(r=2)), learning_rate=0.5)
    options = run_options(trainer, reward)
    assert options["module"]["learning_rate"] == 0.5
    assert options["module"]["reward_model"]["model"] == "builtin:tiny"
    assert options["module"]["reward_model"]["lora"]["r"] == 2
    assert "team" not in options
    both = run_options(trainer, MARLHFModule(make_team(), rl_algorithm="maac", reward_learning_rate=0.25))
    assert (both["module"]["rl_algorithm"], both["module"]["reward_learning_rate"]) == ("maac", 0.25)


def test_a_judge_is_among_the_options_without_its_key(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge = ScoreJudge(ApiEndpoint("https://host/v1", format="openai", model="m"), "helpful")
    data = PreferenceDataModule(ITEMS, text_reward, judge=judge, sampling=SAMPLING)
    trainer = SimpleNamespace(datamodule=data)
    options = run_options(trainer, MADPOModule(make_team()))["data"]["judge"]
    assert (options["class"], options["criteria"], options["endpoint"]["model"]) == ("ScoreJudge", "helpful", "m")
    assert KEY not in json.dumps(options)


def test_a_logger_that_takes_no_options_ends_no_run(tmp_path):
    class Picky(Stub):
        def log_hyperparams(self, params):
            raise TypeError("only numbers")

    with pytest.warns(UserWarning, match="Picky did not take the run's options: TypeError: only numbers"):
        fit(trainer_of(tmp_path, logger=Picky(str(tmp_path), version="a")))


def test_it_is_added_once(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[RunDirectory()])
    fit(trainer)
    assert sum(isinstance(callback, RunDirectory) for callback in trainer.callbacks) == 1


def test_bytes_of_a_checkpoint_load_without_code(tmp_path):
    directory = fit(trainer_of(tmp_path))
    checkpoint = torch.load(next(directory.glob("checkpoints/*.ckpt")), weights_only=True)
    assert checkpoint["options"]["class"] == "MADPOModule"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="optional: needs wandb")
def test_two_offline_runs_with_wandb(tmp_path):
    (tmp_path / "w.yaml").write_text(
        "trainer: {logger: {class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: p, offline: true}}}"
    )
    command = [sys.executable, "-m", "pbrl_lightning", "fit", "--config", CONFIG, "--config", "w.yaml", *rounds(1)]
    paths = os.pathsep.join([str(Path(CONFIG).parents[2]), *sys.path])
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": paths})
    runs = list((tmp_path / "p").iterdir())
    assert len(runs) == 2
    for directory in runs:
        assert contents(directory) >= PARTS | {"report.html", "config.yaml", "curves.json"}
        assert read_run(directory).last("iter/current_iteration") == 1.0
    assert contents(tmp_path) == {"w.yaml", "p", "wandb", "runs"}  # `runs` holds the journal
