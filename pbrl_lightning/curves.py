"""The curves of a run in a bounded number of points, for its report."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning.pytorch.loggers.logger import Logger
from typing_extensions import override

CAPACITY: Final = 256
"""Most points of a curve."""

SMOOTHING: Final = 0.8
"""Weight of the past in the smoothed line of a curve, as in TensorBoard."""

SMOOTHED_FROM: Final = 25
"""Points from which on a curve gets a smoothed line."""

_AGENT: Final = re.compile(r"(?P<quantity>.+)/agent_(?P<agent>\d+)")


@dataclass
class Curve:
    """A series of numbers by step. When it gets too long, neighbours are averaged, over and over.

    Attributes:
        steps: Step of each point: that of its last value.
        values: Value of each point: the mean of its values.
        counts: Values of each point: ``stride``, but for the last one.
        stride: See above; doubled when there are too many points.
        last: The last value as it was; None without any.
        error: Standard errors of the values by step; None where none are logged. Not part of the state.
    """

    # Not lists: those take several times as much memory.
    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    counts: array[float] = field(default_factory=lambda: array("d"))
    stride: int = 1
    last: float | None = None
    error: Curve | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def total(self) -> float:
        """Sum of all values that were added, up to rounding."""
        return math.fsum(value * count for value, count in zip(self.values, self.counts, strict=True))

    def band(self) -> tuple[list[float], list[float]]:
        """One standard error below and above each point; NaN at points without one.

        Where neighbors are averaged, it is the mean of their standard errors: evaluations that share items and random
        numbers are not independent, so averaging does not make them more certain.
        """
        errors = {} if self.error is None else dict(zip(self.error.steps, self.error.values, strict=True))
        points = [(value, errors.get(step, math.nan)) for step, value in zip(self.steps, self.values, strict=True)]
        return [value - error for value, error in points], [value + error for value, error in points]

    def add(self, step: int, value: float) -> None:
        """Adds a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self.last = value
        if self.counts and self.counts[-1] < self.stride:
            self._put(len(self) - 1, step, value, 1)
        else:
            self._append(step, value, 1)
        if len(self) > CAPACITY:
            self._halve()

    def _append(self, step: float, value: float, count: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.counts.append(count)

    def _put(self, place: int, step: float, value: float, count: float) -> None:
        """Adds later values to a point."""
        known = self.counts[place]
        self.steps[place] = step
        self.values[place] = (known * self.values[place] + count * value) / (known + count)
        self.counts[place] = known + count

    def _halve(self) -> None:
        self.stride *= 2
        points = list(zip(self.steps, self.values, self.counts, strict=True))
        self.steps, self.values, self.counts = array("d"), array("d"), array("d")
        for place, point in enumerate(points):
            if place % 2:
                self._put(place // 2, *point)
            else:
                self._append(*point)

    def state_dict(self) -> dict[str, Any]:
        """The curve in plain containers."""
        numbers = {name: list(getattr(self, name)) for name in ("steps", "values", "counts")}
        return {**numbers, "stride": self.stride, "last": self.last}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Curve:
        """What :meth:`state_dict` gave."""
        steps, values, counts = (array("d", state[name]) for name in ("steps", "values", "counts"))
        return cls(steps, values, counts, stride=state["stride"], last=state["last"])


def smoothed(values: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Exponential moving average: ``sum_j weight^j x_(t-j) / sum_j weight^j``, so the start is not pulled to 0.

    Args:
        values: In order.
        weight: Of the past, in [0, 1); 0 leaves the values as they are.

    Example:
        >>> [round(value, 3) for value in smoothed([1.0, 2.0, 2.0], 0.5)]
        [1.0, 1.667, 1.857]
    """
    averages, weighted, weights = [], 0.0, 0.0
    for value in values:
        weighted, weights = weight * weighted + value, weight * weights + 1
        averages.append(weighted / weights)
    return averages


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean, ``sqrt(sum (x - mean)^2 / (n - 1) / n)``; None for fewer than two values.

    Example:
        >>> standard_error([1.0, 3.0])
        1.0
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def error_name(name: str) -> str:
    """What the standard error of a logged mean is called.

    Example:
        >>> error_name("eval/turn_1/reward_mean"), error_name("collect/win_rate")
        ('eval/turn_1/reward_standard_error', 'collect/win_rate_standard_error')
    """
    return f"{name.removesuffix('_mean')}_standard_error"


def agent_names(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Names that are logged once per agent, ``quantity/agent_0`` …, by quantity and agent, both in order.

    Example:
        >>> agent_names(["train/margin/agent_1", "train/margin/agent_0", "train/margin"])
        {'train/margin': {0: 'train/margin/agent_0', 1: 'train/margin/agent_1'}}
    """
    groups: dict[str, dict[int, str]] = {}
    for match in filter(None, map(_AGENT.fullmatch, sorted(names))):
        groups.setdefault(match["quantity"], {})[int(match["agent"])] = match[0]
    return {quantity: dict(sorted(agents.items())) for quantity, agents in groups.items()}


class CurveLogger(Logger):
    """A Lightning logger that keeps every scalar in memory as a :class:`Curve`; it writes nothing.

    Attributes:
        curves: By name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[str, Curve] = {}

    @property
    @override
    def name(self) -> str:
        return "curves"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.curves.setdefault(name, Curve()).add(step or 0, float(value))

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def state_dict(self) -> dict[str, Any]:
        """All curves in plain containers."""
        return {name: curve.state_dict() for name, curve in self.curves.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.curves = {name: Curve.from_state(curve) for name, curve in state.items()}
