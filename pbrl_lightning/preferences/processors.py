"""Ready-made reward processors: what is done to a raw score before it orders pairs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleAndShift:
    """``scale * score + shift``.

    Attributes:
        scale: Factor.
        shift: Added after it.

    Example:
        >>> ScaleAndShift(scale=2.0, shift=1.0)(3.0)
        7.0
    """

    scale: float = 1.0
    shift: float = 0.0

    def __call__(self, score: float) -> float:
        """The processed score."""
        return self.scale * score + self.shift
