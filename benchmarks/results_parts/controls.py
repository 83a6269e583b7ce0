"""Preferences that say nothing: a team that learns from them has learned from something else."""

from __future__ import annotations

import random

from typing_extensions import override

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.preferences.scoring import PreferenceJudge


class CoinJudge(PreferenceJudge):
    """Tosses a coin for each comparison. Evaluation is by the task reward, as in any run.

    Args:
        seed: Of the coin.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._coin: random.Random | None = None

    @override
    async def compare(self, first: list[str], second: list[str], *, prompts: list[str], item: TaskItem) -> float:
        del first, second, prompts, item
        self._coin = self._coin or random.Random(self.seed)
        return float(self._coin.random() < 0.5)
