"""What both sides need to agree on. Only the standard library: the peer's interpreter reads this file too."""

from __future__ import annotations

import zlib
from pathlib import Path

FORMATTERS = ("Be brief. {prompt}", "In detail. {prompt}")
"""Prompt templates of the agents; further agents take them in turn."""

TEMPERATURE, TOP_P, TOP_K = 1.0, 0.95, 50


def reward(*completions: list[str]) -> list[float]:
    """A number in [0, 1) for each joint response that costs nothing and is hardly ever twice the same."""
    return [zlib.crc32("|".join(texts).encode()) / 2**32 for texts in zip(*completions, strict=True)]


def peak_rss() -> int:
    """Bytes of the most memory that this process has held; not of what ran under its id before."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: peak memory is measured on Linux only")
