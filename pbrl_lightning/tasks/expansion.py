"""Expanding an abstract (arXiv-like): one agent writes background and motivation, the other method and implications.

Items have ``abstract_text``, as in the arXiv abstracts that the MAGRPO paper expands. The file that comes with the
package was written for it, and describes no real papers.
"""

from __future__ import annotations

from typing import Final

from pbrl_lightning.agents.prompts import ChatTemplate
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.tasks.levels import LevelReward
from pbrl_lightning.tasks.rows import load_rows, packaged_rows
from pbrl_lightning.tasks.summaries import with_text

_HELD_OUT: Final = 4
_SHARED: Final = "Two writers expand the user's abstract into an introduction of two paragraphs of equal length. "

FORMATTERS: Final[list[ChatTemplate]] = [
    ChatTemplate("{abstract_text}", system=_SHARED + "Write only the first: the background and the motivation."),
    ChatTemplate("{abstract_text}", system=_SHARED + "Write only the second: the method and what follows from it."),
]
"""The two roles in the order of the reward's arguments (background, method). For YAML, by import path."""

expansion_reward: Final = LevelReward(
    first_words=(30, 90),
    second_words=(30, 90),
    length_ratio=(0.8, 1.25),
    vocabulary_ratio=(0.8, 1.25),
    overlap=(0.05, 0.25),
)
"""The reward, for ``data.reward_func`` by import path."""


def load_items(source: str, split: str = "train", limit: int | None = None) -> list[TaskItem]:
    """Items from a file or the hub: what has an ``abstract_text``, which alone is kept.

    Args:
        source: As in :func:`pbrl_lightning.tasks.rows.load_rows`.
        split: Split of a data set.
        limit: Number of leading rows, None for all.

    Raises:
        ValueError: If a row has no text in ``abstract_text``.
    """
    return with_text(load_rows(source, split, limit), "abstract_text")


def train_items() -> list[TaskItem]:
    """The packaged abstracts but for the last four, for ``data.items`` by import path."""
    return with_text(packaged_rows("abstracts_demo.jsonl"), "abstract_text")[:-_HELD_OUT]


def eval_items() -> list[TaskItem]:
    """The last four packaged abstracts, for ``data.eval_items`` by import path."""
    return with_text(packaged_rows("abstracts_demo.jsonl"), "abstract_text")[-_HELD_OUT:]


def metrics(background: list[str], method: list[str]) -> dict[str, float]:
    """Means of the reward's measures, for ``data.eval_metrics``: :meth:`LevelReward.metrics`."""
    return expansion_reward.metrics(background, method)
