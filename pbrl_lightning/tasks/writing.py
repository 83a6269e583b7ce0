"""Writing together: one agent answers in a short sentence, the other in detail, and their lengths must fit.

The reward looks at how long and how varied the two answers are, never at what they say: it is a small, exact
coordination task for a quickstart, not a judge of good writing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from typing_extensions import override

from pbrl_lightning.agents.prompts import ChatTemplate
from pbrl_lightning.agents.roles import JointAdapter
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.tasks.rows import packaged_rows
from pbrl_lightning.utils.errors import ConfigurationError, raise_together

_WORD: Final = re.compile(r"\w+(?:['’]\w+)*")

STOPWORDS: Final = frozenset(
    """a about after again all also am an and any are as at be because been before being both but by can could did do
    does down each for from had has have he her here him his how i if in into is it its just may me might more most
    must my no nor not of off on once only or other our out over own same shall she should so some such than that the
    their them then there these they this those through to too under until up us very was we were what when where
    which while who whom why will with would you your""".split()  # noqa: SIM905 (a list of 130 quoted words reads worse)
)

FORMATTERS: Final[list[ChatTemplate]] = [
    ChatTemplate("{prompt}", system="You are a concise writer. Answer in one short sentence."),
    ChatTemplate("{prompt}", system="You are a thorough writer. Give a detailed answer of a few sentences."),
]
"""The two roles in the order of the reward's arguments (brief, detailed). For YAML, by import path."""

_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")


class SentenceAdapter(JointAdapter):
    """Both roles in one text without tags, for models too small to write them: the first sentence is the brief answer.

    Example:
        >>> SentenceAdapter().parse("Rain is water. It falls. It is wet.", 2), SentenceAdapter().parse(" ", 2)
        (['Rain is water.', 'It falls. It is wet.'], None)
    """

    @override
    def build(self, item: TaskItem, prompts: Sequence[str]) -> list[dict[str, str]]:
        del prompts
        how = "Answer in one short sentence first. Then give a detailed answer of a few sentences."
        return [{"role": "user", "content": f"{item['prompt']}\n\n{how}"}]

    @override
    def parse(self, text: str, num_roles: int) -> list[str] | None:
        parts = _SENTENCE_END.split(text.strip(), maxsplit=num_roles - 1)
        return parts + [""] * (num_roles - len(parts)) if text.strip() else None


def load_items(split: Literal["train", "eval"] = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """The writing tasks that come with the package: twelve rows of self-instruct for each split.

    Args:
        split: ``"train"`` or ``"eval"``; no task is in both.
        limit: Number of leading rows to return, None for all.

    Returns:
        Items with ``id`` and ``prompt``.

    Raises:
        ConfigurationError: If ``split`` is unknown or ``limit`` is below 1.

    Example:
        >>> load_items("train", limit=1)[0]["id"]
        'user_oriented_task_5'
    """
    if split not in ("train", "eval"):
        raise ConfigurationError(f"`split` must be 'train' or 'eval', got {split!r}")
    if limit is not None and limit < 1:
        raise ConfigurationError(f"`limit` must be None or at least 1, got {limit}")
    return packaged_rows(f"writing_{split}.jsonl")[:limit]


def train_items() -> list[dict[str, Any]]:
    """The twelve training items, for ``data.items`` by import path."""
    return load_items("train")


def eval_items() -> list[dict[str, Any]]:
    """The twelve evaluation items, for ``data.eval_items`` by import path."""
    return load_items("eval")


def words(text: str) -> list[str]:
    """The words of a text, case-folded: runs of letters, digits and underscores, apostrophes inside kept.

    Example:
        >>> words("Don't stop, Ångström!")
        ["don't", 'stop', 'ångström']
    """
    return [word.casefold() for word in _WORD.findall(text)]


def content_words(text: str) -> set[str]:
    """The different words of a text that are not stopwords.

    Example:
        >>> sorted(content_words("The cat and the other cat sat."))
        ['cat', 'sat']
    """
    return set(words(text)) - STOPWORDS


def band_score(value: float, low: float, high: float) -> float:
    """1 inside a band, falling linearly to 0 at 0 and at twice its upper end.

    ``max(0, min(1, value / low, 2 - value / high))``

    Args:
        value: What is measured, at least 0.
        low: Lower end of the band, above 0.
        high: Upper end of the band, at least ``low``.

    Returns:
        A score in [0, 1], continuous in ``value``.

    Example:
        >>> [band_score(value, 2, 4) for value in (0, 1, 2, 4, 6, 8)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    return max(0.0, min(1.0, value / low, 2.0 - value / high))


class WritingReward:
    """Do a brief and a detailed answer fit together? A sum of three scores in [0, 1].

    With ``w`` the number of words, ``u`` the number of different words that are not stopwords, and ``band`` being
    :func:`band_score`::

        reward = band(w(brief), *brief_words)
               + band(w(detailed) / w(brief), *length_ratio)
               + band(u(detailed) / u(brief), *vocabulary_ratio)

    The last term is 0 if the brief answer has stopwords only. The whole reward is 0 if either answer has no word.

    Args:
        brief_words: Band for the length of the brief answer, in words.
        length_ratio: Band for the detailed answer's words per word of the brief one.
        vocabulary_ratio: Band for the detailed answer's different content words per such word of the brief one.

    Raises:
        ConfigurationError: If a band is not ``0 < low <= high``.

    Example:
        >>> reward = WritingReward(brief_words=(2, 4), length_ratio=(2, 4), vocabulary_ratio=(2, 4))
        >>> reward(["Bake bread."], ["Mix flour, water and salt, then bake it."])
        [3.0]
    """

    reward_range: tuple[float, float] = (0.0, 3.0)

    def __init__(
        self,
        brief_words: tuple[float, float] = (8, 14),
        length_ratio: tuple[float, float] = (3, 5),
        vocabulary_ratio: tuple[float, float] = (2.5, 4),
    ) -> None:
        bands = {"brief_words": brief_words, "length_ratio": length_ratio, "vocabulary_ratio": vocabulary_ratio}
        wrong = [f"`{name}` must be 0 < low <= high, got {band}" for name, band in bands.items() if not _is_band(band)]
        raise_together(wrong)
        self.brief_words = brief_words
        self.length_ratio = length_ratio
        self.vocabulary_ratio = vocabulary_ratio

    def __call__(self, brief: list[str], detailed: list[str]) -> list[float]:
        """Rewards of B joint responses.

        Args:
            brief: The first agent's answers, length B.
            detailed: The second agent's answers to the same items, length B.

        Returns:
            B rewards in [0, 3].

        Raises:
            ConfigurationError: If the lengths differ.
        """
        if len(brief) != len(detailed):
            raise ConfigurationError(f"`detailed` must have {len(brief)} answers, as `brief` has, got {len(detailed)}")
        return [sum(self.components(*answers)) for answers in zip(brief, detailed, strict=True)]

    def components(self, brief: str, detailed: str) -> tuple[float, float, float]:
        """The three scores of one joint response: brief length, length ratio, vocabulary ratio, each in [0, 1]."""
        brief_length, detailed_length = len(words(brief)), len(words(detailed))
        if not brief_length or not detailed_length:
            return 0.0, 0.0, 0.0
        brief_vocabulary, detailed_vocabulary = len(content_words(brief)), len(content_words(detailed))
        return (
            band_score(brief_length, *self.brief_words),
            band_score(detailed_length / brief_length, *self.length_ratio),
            band_score(detailed_vocabulary / brief_vocabulary, *self.vocabulary_ratio) if brief_vocabulary else 0.0,
        )


def writing_metrics(brief: list[str], detailed: list[str]) -> dict[str, float]:
    """Means over B joint responses, for ``data.eval_metrics``: words of either answer, and the two ratios.

    A ratio is left out of its mean where the brief answer has no word (no content word); empty if B is 0.

    Example:
        >>> writing_metrics(["Bake bread."], ["Mix flour, water and salt, then bake it."])
        {'brief_words': 2.0, 'detailed_words': 8.0, 'length_ratio': 4.0, 'vocabulary_ratio': 2.5}
    """
    pairs = list(zip(brief, detailed, strict=True))
    counts = [[(len(words(text)), len(content_words(text))) for text in pair] for pair in pairs]
    columns: dict[str, list[float]] = {
        "brief_words": [short[0] for short, _ in counts],
        "detailed_words": [long[0] for _, long in counts],
        "length_ratio": [long[0] / short[0] for short, long in counts if short[0]],
        "vocabulary_ratio": [long[1] / short[1] for short, long in counts if short[1]],
    }
    return {name: sum(values) / len(values) for name, values in columns.items() if values}


def _is_band(band: tuple[float, float]) -> bool:
    return 0 < band[0] <= band[1]


writing_reward: Final = WritingReward()
"""The reward with its defaults, for ``data.reward_func`` by import path."""
