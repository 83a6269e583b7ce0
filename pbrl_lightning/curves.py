"""The curves of a run in a bounded number of points, for its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lightning.pytorch.loggers.logger import Logger
from typing_extensions import override

CAPACITY: Final = 256
"""Most points of a curve."""


@dataclass
class Curve:
    """A series of numbers by step. When it gets too long, neighbours are averaged, over and over.

    Attributes:
        points: ``[number of values, last step, mean value]`` each, in order.
        stride: Values per point, but for the last one.
        last: The last value as it was; None without any.
    """

    points: list[list[float]] = field(default_factory=list)
    stride: int = 1
    last: float | None = None

    def add(self, step: int, value: float) -> None:
        """Adds a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self.last = value
        if self.points and self.points[-1][0] < self.stride:
            self.points[-1] = _merged(self.points[-1], [1, step, value])
        else:
            self.points.append([1, step, value])
        if len(self.points) > CAPACITY:
            self.stride *= 2
            pairs = [self.points[start : start + 2] for start in range(0, len(self.points), 2)]
            self.points = [_merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]

    @property
    def steps(self) -> list[float]:
        """Step of each point: that of its last value."""
        return [step for _, step, _ in self.points]

    @property
    def values(self) -> list[float]:
        """Value of each point: a mean over ``stride`` neighbours."""
        return [value for *_, value in self.points]


def _merged(first: list[float], second: list[float]) -> list[float]:
    count = first[0] + second[0]
    return [count, second[1], (first[0] * first[2] + second[0] * second[2]) / count]


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
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # type: ignore[override]
        for name, value in metrics.items():
            self.curves.setdefault(name, Curve()).add(step or 0, float(value))

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def state_dict(self) -> dict[str, Any]:
        """All curves in plain containers."""
        return {
            name: {"points": [list(point) for point in curve.points], "stride": curve.stride, "last": curve.last}
            for name, curve in self.curves.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.curves = {
            name: Curve([list(point) for point in curve["points"]], curve["stride"], curve["last"])
            for name, curve in state.items()
        }
