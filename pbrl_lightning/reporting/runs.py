"""What the directories of runs hold: logged numbers by name, and options."""

from __future__ import annotations

import bisect
import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from pbrl_lightning.run_directory import name_of_directory
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError
from pbrl_lightning.utils.options import flat, readable

EVENTS: Final = "events.out.tfevents.*"
CURVES: Final = "curves.json"
"""What a run without TensorBoard's files and without a CSV logger leaves of its curves."""

_FILES: Final = (EVENTS, "metrics.csv", CURVES, "config.yaml", "hparams.yaml")
EVALUATION: Final = "eval/turn_1/reward_mean"
ERROR: Final = "eval/turn_1/reward_standard_error"


@dataclass
class Series:
    """Numbers of one name, in order of their steps.

    Attributes:
        steps: Optimizer steps.
        values: As many numbers.
        seconds: Since the start, pauses between a stop and a resumption left out; empty where it is not known.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class RunRecord:
    """A run as it is compared.

    Attributes:
        name: What it is called.
        directory: Where it is.
        series: Logged numbers by name.
        options: Flat, by name.
        missing: What is not there, one sentence each.
    """

    name: str
    directory: Path
    series: dict[str, Series]
    options: dict[str, Any]
    missing: list[str]

    def last(self, name: str) -> float | None:
        """The last number of a name; None without any."""
        found = self.series.get(name)
        return found.values[-1] if found is not None and found.values else None

    @property
    def updates(self) -> int | None:
        """Optimizer steps that were logged."""
        return max((series.steps[-1] for series in self.series.values() if series.steps), default=None)

    @property
    def seconds(self) -> float | None:
        """Time of the run: of its rounds where they were timed, else between the first and the last log."""
        rounds = self.series.get("time/round")
        if rounds is not None and rounds.values:
            return sum(rounds.values)
        return max((series.seconds[-1] for series in self.series.values() if series.seconds), default=None)

    def responses_at(self, step: int) -> float | None:
        """Joint responses sampled for training until a step; None where they were not counted."""
        counted = self.series.get("env_step")
        if counted is None or not counted.steps:
            return None
        place = bisect.bisect_right(counted.steps, step)
        return counted.values[place - 1] if place else 0.0


def find_runs(paths: Iterable[str]) -> list[tuple[str | None, Path]]:
    """The runs that are named, each as a directory or as ``name=directory``; of a folder of runs, all in it.

    Raises:
        MissingFileError: If a directory does not exist, or holds no run; all are named at once.
        ConfigurationError: If one run is named twice.
    """
    found: list[tuple[str | None, Path]] = []
    problems = []
    for given in paths:
        name, equals, place = given.partition("=")
        named = bool(equals) and not Path(given).exists()
        path = Path(place if named else given).expanduser()
        if not path.is_dir():
            problems.append(f"the run {str(path)!r} does not exist")
            continue
        below = [path] if _is_run(path) else sorted(filter(_is_run, {file.parent for file in path.rglob("*.*")}))
        below = [run for run in below if not _is_part(run, below)]
        if not below:
            problems.append(f"{str(path)!r} holds no run: no {', '.join(_FILES)}")
        found += [(name if named and len(below) == 1 else None, run) for run in below]
    if problems:
        raise MissingFileError("; ".join(problems))
    resolved = [run.resolve() for _, run in found]
    twice = [str(run) for place, (_, run) in enumerate(found) if resolved[place] in resolved[:place]]
    if twice:
        raise ConfigurationError(f"each run must be named once, got {', '.join(twice)} again")
    return found


def read_run(directory: Path, name: str | None = None) -> RunRecord:
    """Reads a run's directory.

    Args:
        directory: Of the run.
        name: What to call it; default its ``run_name``, or its directory's last parts.
    """
    missing = []
    series = _merged(_curves(directory), _csv(directory), _events(directory))
    if not series:
        missing.append("no logged numbers (no TensorBoard files, metrics.csv or curves.json)")
    elif EVALUATION not in series and "reward/val_accuracy" not in series:
        missing.append("no evaluation was logged")
    options = _options(directory)
    if not options:
        missing.append("no options (no readable hparams.yaml or config.yaml)")
    return RunRecord(name or name_of_directory(directory), directory, series, options, missing)


def _is_run(path: Path) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in _FILES)


def _is_part(path: Path, runs: list[Path]) -> bool:
    """True for a folder within a run."""
    return any(run in path.parents for run in runs)


def _events(directory: Path) -> dict[str, Series]:
    """Scalars of TensorBoard's files; a resumed run has several."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, tuple[float, float]]] = {}
    passed = 0.0
    for file in sorted(directory.glob(EVENTS), key=lambda file: file.name):
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0, "images": 1, "histograms": 1, "tensors": 1})
        reader.Reload()
        scalars = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
        begun = min((event.wall_time for events in scalars.values() for event in events), default=0.0)
        ended = begun
        for tag, events in scalars.items():
            for event in events:
                ended = max(ended, event.wall_time)
                _put(found, tag, event.step, event.value, passed + event.wall_time - begun)
        passed += ended - begun
    return {tag: _ordered(points) for tag, points in found.items()}


def _csv(directory: Path) -> dict[str, Series]:
    """Rows of the CSV logger."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name in ("metrics_earlier.csv", "metrics.csv"):
        path = directory / name
        if not path.is_file():
            continue
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                step = int(float(row.get("step") or 0))
                for tag, text in row.items():
                    if tag not in (None, "step") and text:
                        _put(found, tag, step, float(text), math.nan)
    return {tag: _ordered(points) for tag, points in found.items()}


def _curves(directory: Path) -> dict[str, Series]:
    """The curves that a run itself left, of bounded length."""
    path = directory / CURVES
    if not path.is_file():
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    return {tag: Series([int(step) for step in curve["steps"]], curve["values"]) for tag, curve in saved.items()}


def _put(found: dict[str, dict[int, tuple[float, float]]], tag: str, step: int, value: float, at: float) -> None:
    """Adds a point. A resumed run logs some steps again: the last value counts, of times their sum."""
    points = found.setdefault(tag, {})
    if tag.startswith("time/") and step in points:
        value += points[step][0]
    points[step] = (value, at)


def _merged(*sources: Mapping[str, Series]) -> dict[str, Series]:
    """Curves from several places: of a name, the longest, and what the others have before it begins."""
    merged: dict[str, Series] = {}
    for source in sources:
        for tag, series in source.items():
            known = merged.get(tag, Series())
            earlier = sum(step < series.steps[0] for step in known.steps) if series.steps else len(known.steps)
            steps, values = known.steps[:earlier] + series.steps, known.values[:earlier] + series.values
            if series.steps and (not known.steps or known.steps[-1] <= series.steps[-1]):
                merged[tag] = Series(steps, values, series.seconds if not earlier else [])
    return merged


def _ordered(points: Mapping[int, tuple[float, float]]) -> Series:
    finite = sorted((step, value, at) for step, (value, at) in points.items() if math.isfinite(value))
    timed = [at for _, _, at in finite if not math.isnan(at)]
    return Series([step for step, _, _ in finite], [value for _, value, _ in finite], timed)


def _options(directory: Path) -> dict[str, Any]:
    """The run's options by flat names, from what it wrote of them, or else from its config."""
    saved = _yaml(directory / "hparams.yaml")
    if "module" in saved:
        return flat(saved)
    config = _yaml(directory / "config.yaml")
    if not isinstance(config.get("model"), Mapping):
        return {}
    module = {"class": _class(config["model"]), **(config["model"].get("init_args") or {})}
    team = module.pop("team", None) or {}
    options = {"module": module, "team": team.get("init_args", team), "data": config.get("data") or {}}
    return flat(readable(options))


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _class(spec: Mapping[str, Any]) -> str:
    return str(spec.get("class_path", "?")).rpartition(".")[2]
