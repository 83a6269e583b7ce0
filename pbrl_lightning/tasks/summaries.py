"""Summaries in two lengths (TLDR-like): one agent sums a post up in a sentence, the other retells it in detail.

Items have ``prompt``, the post, as in ``trl-lib/tldr``. The file that comes with the package was written for it.
"""

from __future__ import annotations

from typing import Final

from pbrl_lightning.agents.prompts import ChatTemplate
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.tasks.levels import LevelReward
from pbrl_lightning.tasks.rows import load_rows, packaged_rows
from pbrl_lightning.utils.errors import ConfigurationError

_HELD_OUT: Final = 4

FORMATTERS: Final[list[ChatTemplate]] = [
    ChatTemplate("{prompt}", system="Sum the user's text up in one or two short sentences."),
    ChatTemplate(
        "{prompt}",
        system="Retell the user's text in a detailed paragraph, in other words, with transitions such as 'however'.",
    ),
]
"""The two roles in the order of the reward's arguments (summary, detailed retelling). For YAML, by import path."""

summary_reward: Final = LevelReward(
    first_words=(10, 40),
    second_words=(30, 100),
    length_ratio=(2.0, 3.5),
    vocabulary_ratio=(1.8, 3.0),
    overlap=(0.1, 0.4),
)
"""The reward, for ``data.reward_func`` by import path."""


def load_items(source: str, split: str = "train", limit: int | None = None) -> list[TaskItem]:
    """Items from a file or the hub, such as ``datasets:trl-lib/tldr``: what has a ``prompt``, which alone is kept.

    Args:
        source: As in :func:`pbrl_lightning.tasks.rows.load_rows`.
        split: Split of a data set.
        limit: Number of leading rows, None for all.

    Raises:
        ConfigurationError: If a row has no text in ``prompt``.
    """
    return with_text(load_rows(source, split, limit), "prompt")


def with_text(rows: list[TaskItem], field: str) -> list[TaskItem]:
    """Items of this one field of each row.

    Raises:
        ConfigurationError: If a row has no text there.
    """
    for index, row in enumerate(rows):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ConfigurationError(
                f"row {index} must have text in {field!r}, got {row.get(field)!r}; it has {sorted(row)}"
            )
    return [{field: row[field]} for row in rows]


def train_items() -> list[TaskItem]:
    """The packaged posts but for the last four, for ``data.items`` by import path."""
    return with_text(packaged_rows("summaries_demo.jsonl"), "prompt")[:-_HELD_OUT]


def eval_items() -> list[TaskItem]:
    """The last four packaged posts, for ``data.eval_items`` by import path."""
    return with_text(packaged_rows("summaries_demo.jsonl"), "prompt")[-_HELD_OUT:]


def metrics(summary: list[str], detailed: list[str]) -> dict[str, float]:
    """Means of the reward's measures, for ``data.eval_metrics``: :meth:`LevelReward.metrics`."""
    return summary_reward.metrics(summary, detailed)
