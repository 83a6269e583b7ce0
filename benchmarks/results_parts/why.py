"""Why a row does not learn, found by looking at its runs; shown only where the numbers say that it does not."""

from __future__ import annotations

from typing import Final

WHY: Final[dict[str, str]] = {}
"""By the row's name."""
