"""The curves of a run in a bounded number of points, for its report."""

from __future__ import annotations

import math
from array import array
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
        steps: Step of each point: that of its last value.
        values: Value of each point: the mean of its values.
        counts: Values of each point: ``stride``, but for the last one.
        stride: See above; doubled when there are too many points.
        last: The last value as it was; None without any.
    """

    # Not lists: those take several times as much memory.
    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    counts: array[float] = field(default_factory=lambda: array("d"))
    stride: int = 1
    last: float | None = None

    def __len__(self) -> int:
        return len(self.steps)

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
        numbers = {name: array("d", state[name]) for name in ("steps", "values", "counts")}
        return cls(**numbers, stride=state["stride"], last=state["last"])


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
