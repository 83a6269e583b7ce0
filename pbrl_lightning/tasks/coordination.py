"""A small synthetic task: the agents must end with the same letter. It shows quickly whether a team learns."""

from __future__ import annotations

from pbrl_lightning.batches import TaskItem

reward_range = (0.0, 1.0)


def train_items() -> list[TaskItem]:
    """16 one-letter prompts."""
    return [{"prompt": letter} for letter in "abcdefghijklmnop"]


def eval_items() -> list[TaskItem]:
    """8 other prompts."""
    return [{"prompt": letter} for letter in "qrstuvwx"]


def same_last_letter(*completions: list[str]) -> list[float]:
    """1 where all agents' responses end with the same character, else 0.

    Example:
        >>> same_last_letter(["ab", "a", ""], ["cb", "b", ""])
        [1.0, 0.0, 0.0]
    """
    return [float(all(texts) and len({text[-1] for text in texts}) == 1) for texts in zip(*completions, strict=True)]
