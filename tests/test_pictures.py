"""What whole runs show: to which loggers it goes, that it is right, bounded, safe, and that no result depends on it."""

import csv
import json
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_report import Page, pair, safe

from pbrl_lightning import (
    CurrentComparator,
    HistoryComparator,
    JointRewardModel,
    JointRewardModule,
    MARLHFModule,
    MARLModule,
    PreferenceDataModule,
    ReferenceKL,
)
from pbrl_lightning.callbacks import RewardDistribution, RoundFigures, RunReport, SampleTable, run_report
from pbrl_lightning.preferences.round_files import write_round_file
from training_runs import (
    Killer,
    StopError,
    make_data,
    make_module,
    make_team,
    make_trainer,
    same_weights,
    text_reward,
    weights_of,
)

pytestmark = pytest.mark.figures


class FakeWandb(Logger):
    """What WandbLogger has, and remembers."""

    name, version = "fake", "0"

    def __init__(self):
        super().__init__()
        self.metrics, self.tables, self.images = [], [], []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.tables.append((step, key, columns, data))

    def log_image(self, key, images, step=None):
        self.images.append((step, key, images))


@pytest.fixture
def wandb(monkeypatch):
    module = SimpleNamespace(Histogram=lambda values: ("histogram", values))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return FakeWandb()


# -- whole runs ----------------------------------------------------------------------------------------------------


class Scores:
    """Remembers every score that the task reward gave, processor not applied."""

    reward_range = (0.0, 10.0)

    def __init__(self):
        self.given = []

    def __call__(self, *completions):
        scores = text_reward(*completions)
        self.given += zip(zip(*completions, strict=True), scores, strict=True)
        return scores


def test_the_scores_of_a_round_are_written(tmp_path):
    data = make_data(Scores(), pairs_per_sample=2, reward_processor=lambda score: 2 * score + 100, eval_items=None)
    trainer = make_trainer(tmp_path, [RewardDistribution(str(tmp_path / "here"))])
    trainer.fit(make_module(make_team(True), rounds=1), data)
    found = json.loads((tmp_path / "here" / "iteration_0001.json").read_text())
    assert found["candidates"]["current"]["mean"] == pytest.approx((data.rounds[0].reward_mean - 100) / 2)
    pairs = json.loads((tmp_path / "replay" / "iteration_0001.json").read_text())["pairs"]
    assert found["selected_pairs"]["current"]["values"] == [entry["target_raw_reward"] for entry in pairs]
    assert found["bin_edges"][-1] == 10.0
    assert not list(tmp_path.rglob("report.html"))  # who logs nothing gets none


@pytest.mark.slow
def test_a_run_with_all_loggers(tmp_path, wandb):
    reward = Scores()
    loggers = [TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv"), wandb]
    trainer = make_trainer(tmp_path, [RewardDistribution()], logger=loggers, log_every_n_steps=1)
    team = make_team(True)
    data = make_data(reward, reward_processor=lambda score: 2 * score + 100, pairs_per_sample=2)
    trainer.fit(make_module(team, rounds=2), data)
    root = tmp_path / "tb" / "version_0"
    assert trainer.loggers == loggers  # nothing is left behind

    # S14's file: all scores of both sides, raw, and those of the pairs in the round files.
    for number in (1, 2):
        found = json.loads((root / "reward_distributions" / f"iteration_{number:04d}.json").read_text())
        record = data.rounds[number - 1]
        assert (found["iteration"], found["reward_range"]) == (number, [0.0, 10.0])
        assert found["bin_edges"] == [10 * edge / 16 for edge in range(17)]
        candidates = found["candidates"]
        assert candidates["current"]["mean"] == pytest.approx((record.reward_mean - 100) / 2)
        assert candidates["comparator"]["mean"] == pytest.approx((record.comparator_reward_mean - 100) / 2)
        pairs = json.loads((root / "replay" / f"iteration_{number:04d}.json").read_text())["pairs"]
        selected = found["selected_pairs"]
        assert selected["current"]["values"] == [entry["target_raw_reward"] for entry in pairs]
        assert selected["comparator"]["values"] == [entry["comparator_raw_reward"] for entry in pairs]
        for part in (*candidates.values(), *selected.values()):
            assert sum(part["counts"]) == part["count"] == len(part["values"]) > 0
            assert part["mean"] == pytest.approx(fmean(part["values"]))
    given = [score for _, score in reward.given]
    # Collection scores an item's candidates of one side, then of the other.
    assert candidates["current"]["count"] == candidates["comparator"]["count"] == 12
    assert set(candidates["current"]["values"]) <= set(given)

    starts = [record.first_step for record in data.rounds]
    events = EventAccumulator(str(root), size_guidance={"images": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    groups = ["rewards/candidates", "rewards/comparator_candidates", "rewards/selected", "rewards/comparator_selected"]
    assert set(events.Tags()["histograms"]) == {*groups, "train/margins"}
    assert set(events.Tags()["images"]) == {"figures/rewards", "figures/train_margins"}
    for name in groups:
        assert [event.step for event in events.Histograms(name)] == starts
    assert events.Histograms("rewards/candidates")[-1].histogram_value.num == 12
    assert [event.step for event in events.Images("figures/rewards")] == starts
    ends = [event.step for event in events.Histograms("train/margins")]
    assert ends == [starts[1], trainer.global_step]
    assert events.Histograms("train/margins")[0].histogram_value.num == data.rounds[0].train_pairs
    assert [event.step for event in events.Tensors("collect/samples/text_summary")] == starts

    tables = tmp_path / "csv" / "version_0" / "tables"
    with (tables / "eval_samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["item"]) for row in rows] == [
        (str(step), str(item)) for step in (0, trainer.global_step) for item in range(4)
    ]
    assert all(float(row["reward"]) >= 100 for row in rows)
    with (tables / "collect_samples.csv").open(newline="") as file:
        names = {"step", "item", "side", "reward", "prompt", "agent 0", "agent 1"}
        assert next(csv.DictReader(file)).keys() == names
    figures = tmp_path / "csv" / "version_0" / "figures"
    assert sorted(path.name for path in figures.iterdir()) == sorted(
        [f"rewards_{step:06d}.png" for step in starts] + [f"train_margins_{step:06d}.png" for step in ends]
    )
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.iterdir())

    assert [(step, key) for step, key, *_ in wandb.tables if key == "eval/samples"] == [
        (0, "eval/samples"),
        (trainer.global_step, "eval/samples"),
    ]
    assert [(step, key) for step, key, _ in wandb.images if key == "figures/rewards"] == [
        (step, "figures/rewards") for step in starts
    ]
    assert all(image.dtype == np.uint8 and image.shape[2] == 3 for *_, (image,) in wandb.images)
    shown = {name: values for _, metrics in wandb.metrics for name, values in metrics.items() if "candidates" in name}
    assert shown["rewards/candidates"] == ("histogram", candidates["current"]["values"])

    text = (root / "report.html").read_text(encoding="utf-8")
    assert safe(text)
    said = "\n".join(Page(text).texts)
    assert {
        "Time",
        "Options",
        "MADPOModule",
        "training",
        "total time",
        "Bands are one standard error of the mean to each side.",
    } <= set(said.split("\n"))
    events_of = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    for number, record in enumerate(data.rounds):
        found = json.loads((root / "reward_distributions" / f"iteration_{number + 1:04d}.json").read_text())[
            "candidates"
        ]
        sides = found["current"]["values"], found["comparator"]["values"]
        won = fmean([1.0 if own > other else 0.5 if own == other else 0.0 for own, other in zip(*sides, strict=True)])
        assert events_of["collect/win_rate"][number] == pytest.approx(won)
        assert record.details["collect/win_rate"] == won
        for side, name in zip(sides, ("reward", "comparator_reward"), strict=True):
            error = 2 * stdev(side) / len(side) ** 0.5  # the processor doubles every score
            assert events_of[f"collect/{name}_standard_error"][number] == pytest.approx(error)
    assert all(0 < length <= 2 for length in events_of["collect/response_length/agent_1"])
    assert len(events_of["eval/response_length/agent_0"]) == len(events_of["eval/turn_1/reward_mean"])
    for title in (
        "Win rate against the comparator",
        "Response length in collection",
        "Curves",
        "Rounds",
        "MADPO loss",
        "Evaluation: mean task reward",
        "Round 1",
        "Round 2",
        "before ·",
    ):
        assert title in said

    # The same run without any of it ends with the same weights.
    plain = make_team(True)
    other = make_data(reward, reward_processor=lambda score: 2 * score + 100, pairs_per_sample=2)
    make_trainer(tmp_path / "plain").fit(make_module(plain, rounds=2), other)
    assert same_weights(weights_of(team), weights_of(plain))


def test_a_trial_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = [RewardDistribution(), RoundFigures(), RunReport(), SampleTable()]
    make_trainer(tmp_path, callbacks, logger=True, fast_dev_run=True).fit(
        make_module(make_team(True), rounds=1), make_data()
    )
    assert list(tmp_path.rglob("*")) == []


def test_a_report_that_cannot_be_made_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "render", lambda run: 1 / 0)
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match="no report was written: ZeroDivisionError: division by zero"):
        trainer.fit(make_module(make_team(True), rounds=1), make_data(eval_items=None))
    assert not list(tmp_path.rglob("report.html"))


def test_a_run_that_is_not_evaluated_says_so_and_has_numbers_for_its_only_round(tmp_path):
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path, name="named"), log_every_n_steps=1)
    said = report_of(trainer, make_module(make_team(True)), make_data(iterative=False, eval_items=None)).split("\n")
    assert "named/version_0" in " ".join(said)
    assert "not evaluated: no evaluation items were given" in said
    assert "Collection: mean score of a round: current agents" in said
    assert not any(line.startswith(("Evaluation:", "Win rate")) for line in said)
    assert "before and after" not in " ".join(said)


def test_what_comes_by_itself(tmp_path):
    data = make_data(eval_items=None)
    for logger, fast, expected in ((True, False, 3), (False, False, 0), (True, True, 0)):
        trainer = make_trainer(
            tmp_path, logger=CSVLogger(tmp_path) if logger else False, fast_dev_run=fast, max_steps=1
        )
        module = make_module(make_team(True), rounds=1)
        module._trainer = trainer
        trainer.datamodule = data
        names = [type(callback).__name__ for callback in module.wanted_callbacks()]
        assert sum(name in ("RoundFigures", "RunReport", "SampleTable") for name in names) == expected
        assert "RewardDistribution" not in names  # S14: an option


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampleTable(0), "`num_items` must be >= 1"),
        (lambda: RunReport(num_samples=-1), "`num_samples` must be"),
    ],
)
def test_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wrong_range_is_found_before_anything_is_sampled(tmp_path):
    reward = Scores()
    reward.reward_range = (1.0, 0.0)
    trainer = make_trainer(tmp_path, [RewardDistribution()])
    with pytest.raises(ValueError, match="`reward_range` of `Scores` must ascend"):
        trainer.fit(make_module(make_team(True), rounds=1), make_data(reward))
    assert reward.given == []


# -- every kind of run ---------------------------------------------------------------------------------------------


def report_of(trainer, module, data):
    trainer.fit(module, data)
    text = (Path(trainer.log_dir) / "report.html").read_text(encoding="utf-8")
    assert safe(text)
    return "\n".join(Page(text).texts)


def shown_by(trainer):
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    return set(events.Tags()["histograms"]), set(events.Tags()["images"])


@pytest.mark.slow
def test_a_base_run(tmp_path):
    trainer = make_trainer(tmp_path, [RewardDistribution()], logger=TensorBoardLogger(tmp_path), log_every_n_steps=1)
    said = report_of(trainer, make_module(make_team(True), num_train_epochs=2), make_data(iterative=False))
    found = json.loads((Path(trainer.log_dir) / "reward_distributions" / "iteration_0001.json").read_text())
    pairs = json.loads((Path(trainer.log_dir) / "replay" / "iteration_0001.json").read_text())["pairs"]
    both = [entry[side] for entry in pairs for side in ("winner_reward", "loser_reward")]
    assert found["selected_pairs"]["current"]["values"] == both
    assert found["candidates"]["comparator"] | {"counts": 0} == {
        "count": 0, "mean": None, "counts": 0, "below": 0, "above": 0, "values": []
    }  # fmt: skip
    assert found["reward_range"] is None
    assert "Round 1" in said
    assert "MADPO loss" in said


@pytest.mark.slow
def test_marlhf_in_rounds(tmp_path):
    module = MARLHFModule(
        make_team(), num_iterations=2, num_reward_epochs=2, num_train_epochs=1, num_generations=2,
        reference_kl=ReferenceKL(0.05), learning_rate=1e-3, reward_learning_rate=1e-3,
        reward_model=JointRewardModel("builtin:tiny"),
    )  # fmt: skip
    trainer = make_trainer(tmp_path, logger=TensorBoardLogger(tmp_path), log_every_n_steps=1)
    said = report_of(trainer, module, make_data())
    histograms, images = shown_by(trainer)
    assert histograms == {"reward/margins", "rollout/rewards", "policy/kls"}
    assert "figures/calibration" in images
    for title in ("Reward model: loss", "Policy loss", "KL against the reference", "Round 2"):
        assert title in said


@pytest.mark.slow
def test_the_kls_that_are_drawn_are_those_that_are_logged(tmp_path, wandb):
    class Kept(RoundFigures):
        def on_round_end(self, trainer, pl_module, round_number):
            self.kls = torch.cat(self._found["policy/kls"][1])
            super().on_round_end(trainer, pl_module, round_number)

    kept = Kept()
    module = MARLModule(
        make_team(), num_generations=2, num_train_epochs=2, reference_kl=ReferenceKL(0.05), learning_rate=1e-2
    )
    trainer = make_trainer(tmp_path, [kept], logger=wandb)
    trainer.fit(module, make_data(iterative=False, rollout_batch_size=3))
    logged = [metrics["policy/kl"] for _, metrics in wandb.metrics if "policy/kl" in metrics]
    assert len(kept.kls) == 2 * 3 * 2
    assert kept.kls.mean().item() == pytest.approx(logged[-1], rel=1e-6)
    assert logged[-1] > 1e-6


@pytest.mark.slow
def test_a_reward_model_alone(tmp_path):
    pairs = [pair(f"p{number % 5}", f"a{number}", f"b{number}") for number in range(20)]
    write_round_file(tmp_path / "pairs.json", 1, pairs)
    module = JointRewardModule(JointRewardModel("builtin:tiny"), learning_rate=1e-3)
    trainer = make_trainer(tmp_path, logger=TensorBoardLogger(tmp_path), log_every_n_steps=1)
    data = PreferenceDataModule(pairs=[str(tmp_path / "pairs.json")], val_fraction=0.4)
    said = report_of(trainer, module, data)
    histograms, images = shown_by(trainer)
    assert histograms == {"reward/margins", "reward/val_margins"}
    assert "figures/calibration" in images
    assert "held-out pairs" in said
    assert "Rounds" not in said.split("\n")


@pytest.mark.slow
def test_marl_alone_and_a_second_fit(tmp_path):
    report = RunReport(str(tmp_path / "here"))
    for _ in range(2):
        module = MARLModule(make_team(), num_generations=2, num_train_epochs=1, learning_rate=1e-3)
        trainer = make_trainer(tmp_path, [report], logger=CSVLogger(tmp_path), log_every_n_steps=1)
        trainer.fit(module, make_data(iterative=False))
        assert report._curves.curves["policy/loss"].steps[-1] == trainer.global_step - 1
        assert len(report._curves.curves["policy/loss"].steps) == trainer.global_step  # of this fit alone
    assert "Policy loss" in (tmp_path / "here" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 9])
def test_a_resumed_runs_report_is_that_of_the_whole_run(tmp_path, step):
    def start(name, callbacks=(), checkpoint=None):
        report = RunReport()
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(
            tmp_path / name, [saver, report, RewardDistribution(), *callbacks],
            logger=CSVLogger(tmp_path / name), log_every_n_steps=1, enable_checkpointing=True, max_epochs=-1,
        )  # fmt: skip
        with suppress(StopError):
            trainer.fit(
                make_module(make_team(), rounds=3), make_data(comparator=HistoryComparator(2)), ckpt_path=checkpoint
            )
        return report, trainer

    whole, _ = start("whole")
    start("killed", [Killer(step)])
    resumed, trainer = start("killed", checkpoint=str(tmp_path / "killed" / f"step={step}.ckpt"))

    def of(report):
        state = report.state_dict()
        timed = ("time/", "collect/tokens", "collect/seconds", "train/tokens")
        curves = {
            name: list(zip(curve["steps"], curve["values"], strict=True))
            for name, curve in state["curves"].items()
            if not name.startswith(timed)
        }
        return curves, state["rounds"]

    (curves, rounds), (expected, expected_rounds) = of(resumed), of(whole)
    assert rounds == expected_rounds
    assert curves.keys() == expected.keys()
    for name, points in curves.items():
        # Lightning logs a step after its checkpoint is written: that step's own point is not in it.
        lost = [point for point in expected[name] if point not in points]
        assert all(point in expected[name] for point in points)
        assert [last for last, _ in lost] in ([], [step - 1])
    assert curves["eval/turn_1/reward_mean"] == expected["eval/turn_1/reward_mean"]
    text = (Path(trainer.log_dir) / "report.html").read_text(encoding="utf-8")
    assert "before · " in text
    assert "Round 1" in text


@pytest.mark.slow
def test_nothing_grows_with_the_rounds(tmp_path):
    class Sizes(RoundFigures):
        sizes = ()

        def on_round_start(self, trainer, pl_module, round_number):
            report = next(callback for callback in trainer.callbacks if isinstance(callback, RunReport))
            rest = {key: value for key, value in report.state_dict().items() if key != "curves"}
            self.sizes = (*self.sizes, (len(pickle.dumps(rest)), len(self._found)))

    sizes = Sizes()
    trainer = make_trainer(tmp_path, [sizes], logger=CSVLogger(tmp_path), max_epochs=-1)
    trainer.fit(make_module(make_team(), rounds=12, learning_rate=1e-4), make_data(comparator=CurrentComparator()))
    held = [size for size, _ in sizes.sizes[2:]]
    assert max(held) - min(held) < 400  # texts of one round or of another
    assert {count for _, count in sizes.sizes} == {0}
