"""A small synthetic task: the agents must end with the same letter. It shows quickly whether a team learns.

The reward is sparse (:func:`same_last_letter`: they agree or not) or dense (:func:`close_last_letters`: how nearly).
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from pbrl_lightning.agents.roles import JointAdapter
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


def close_last_letters(*completions: list[str]) -> list[float]:
    """How near the last characters are: 1 where they are the same, 0 from 64 code points on or where one is silent.

    ``max(0, 1 - (largest - smallest) / 64)`` of the code points.

    Example:
        >>> close_last_letters(["ab", "a", ""], ["xb", "q", "b"])  # q is 16 letters after a
        [1.0, 0.75, 0.0]
    """
    rewards = []
    for texts in zip(*completions, strict=True):
        last = [ord(text[-1]) for text in texts if text]
        rewards.append(max(0.0, 1 - (max(last) - min(last)) / 64) if len(last) == len(texts) else 0.0)
    return rewards


class CharacterAdapter(JointAdapter):
    """Each character of a joint text is the response of one role: a random model can write that, and no tags.

    Example:
        >>> CharacterAdapter().parse("xyz", 2), CharacterAdapter().parse("", 2)
        (['x', 'y'], None)
    """

    @override
    def build(self, item: TaskItem, prompts: Sequence[str]) -> str:
        del item
        return "|".join(prompts)

    @override
    def parse(self, text: str, num_roles: int) -> list[str] | None:
        return [text[role : role + 1] for role in range(num_roles)] if text else None
