"""Rows of the table: measured in turns with the limit and the peer, printed, and kept as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from speed_parts.limit import Matrices, Products


@dataclass
class Row:
    """One line.

    Attributes:
        name: What was measured.
        value: How much of ``unit``.
        unit: Of ``value`` and ``peer``.
        seconds: Median time of one call, None where no time was taken.
        limit_share: Useful FLOP/s over the rate of the same matrix products; median over the repeats.
        peer: What the peer reached.
        ratio: How many times as good as the peer; median of the ratios of neighbouring calls.
        note: What else the table says.
        extra: Further numbers, for the JSON.
    """

    name: str
    value: float
    unit: str
    seconds: float | None = None
    limit_share: float | None = None
    peer: float | None = None
    ratio: float | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON, what is None left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


Rows = Iterator[Row]


class Turns:
    """Times of our calls, each beside one of the matrix products and one of the peer: all meet the same moods.

    Args:
        products: The matrix products of one call, per model.
        theirs: One call of the peer; returns its seconds. None without a peer.
        known: Seconds of the peer that were taken before, instead.
    """

    def __init__(
        self,
        products: list[tuple[Matrices, list[Products]]],
        theirs: Callable[[], float] | None = None,
        known: list[float] | None = None,
    ) -> None:
        self._products, self._theirs = products, theirs
        self._ours: list[float] = []
        self._limits: list[float] = []
        self.peers: list[float] = list(known or [])

    def warm_up(self) -> None:
        """A call of the peer that does not count."""
        if self._theirs is not None:
            self._theirs()

    def add(self, seconds: float) -> float:
        """Takes the time of one of our calls, measures the others now, and gives it back."""
        self._ours.append(seconds)
        self._limits.append(sum(matrices.seconds(some) for matrices, some in self._products))
        if self._theirs is not None:
            self.peers.append(self._theirs())
        return seconds

    def row(self, name: str, amount: float, unit: str, *, note: str = "", extra: dict[str, Any] | None = None) -> Row:
        """The row.

        Args:
            name: Its name.
            amount: What one call gets done.
            unit: Of ``amount`` per second.
            note: What else the table says.
            extra: Further numbers.
        """
        ours, limits, peers = self._ours, self._limits, self.peers
        flops = sum(matrices.flops(some) for matrices, some in self._products)
        numbers = {
            "all_seconds": ours,
            "limit_seconds": limits,
            "peer_seconds": peers,
            "useful_gflops": flops / 1e9,
            "gflops_per_second": flops / median(ours) / 1e9,
            "limit_gflops_per_second": flops / median(limits) / 1e9,
        }
        return Row(
            name,
            amount / median(ours),
            unit,
            seconds=median(ours),
            limit_share=median(limit / own for limit, own in zip(limits, ours, strict=True)),
            peer=amount / median(peers) if peers else None,
            ratio=_ratio(peers, ours) if peers else None,
            note=note,
            extra={**numbers, **(extra or {})},
        )


def _ratio(peers: list[float], ours: list[float]) -> float:
    """Median of neighbouring calls; a run that was stopped, or times taken before, may have fewer of the peer's."""
    if len(peers) != len(ours):
        return median(peers) / median(ours)
    return median(peer / own for peer, own in zip(peers, ours, strict=True))


_HEADS = ("what", "ours", "unit", "seconds", "of the limit", "peer", "ratio", "note")


def header() -> str:
    """The first two lines of the table."""
    return f"| {' | '.join(_HEADS)} |\n|{'---|' * len(_HEADS)}"


def line(row: Row) -> str:
    """One row of the table."""
    cells = [
        row.name,
        _short(row.value),
        row.unit,
        _short(row.seconds),
        "" if row.limit_share is None else f"{row.limit_share:.0%}",
        _short(row.peer),
        "" if row.ratio is None else f"{row.ratio:.2f}×",
        row.note,
    ]
    return f"| {' | '.join(cells)} |"


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
