"""Level-based rewards for two texts that belong together: lengths, their ratio, vocabulary, style.

After the collaborative-writing experiments of MAGRPO (Liu et al. 2025, arXiv 2508.04652): token limits, then how the
lengths go together, then how the vocabularies do, then transition words and overlap. The form is theirs, the formulas
and numbers here are ours. What the texts say is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pbrl_lightning.tasks.writing import band_score, content_words, words
from pbrl_lightning.utils.errors import ConfigurationError, raise_together

TRANSITIONS: Final[dict[str, tuple[str, ...]]] = {
    "addition": ("also", "moreover", "furthermore", "in addition", "besides", "similarly", "likewise"),
    "contrast": ("however", "but", "although", "though", "whereas", "nevertheless", "yet", "instead", "in contrast"),
    "cause": ("because", "therefore", "thus", "hence", "consequently", "as a result", "so that", "due to"),
    "example": ("for example", "for instance", "such as", "in particular", "specifically", "namely"),
    "order": ("first", "firstly", "second", "secondly", "then", "next", "finally", "meanwhile", "afterwards"),
    "conclusion": ("in conclusion", "in summary", "overall", "to conclude", "in short", "ultimately"),
}
"""Transition words by what they do."""

_PATTERNS: Final = {
    kind: re.compile(r"\b(?:" + "|".join(found) + r")\b", re.IGNORECASE) for kind, found in TRANSITIONS.items()
}

_WEIGHTS: Final = (0.5, 1.0, 1.0, 0.5)


def transition_kinds(text: str) -> set[str]:
    """The kinds of transition words in a text.

    Example:
        >>> sorted(transition_kinds("First mix it. However, do not stir, because it would sink."))
        ['cause', 'contrast', 'order']
    """
    return {kind for kind, pattern in _PATTERNS.items() if pattern.search(text)}


def overlap(first: str, second: str) -> float:
    """Jaccard similarity of the texts' content words, in [0, 1]; 0 if neither has any.

    Example:
        >>> overlap("Bake good bread.", "Good bread rises.")
        0.5
    """
    one, two = content_words(first), content_words(second)
    return len(one & two) / len(one | two) if one | two else 0.0


@dataclass(frozen=True)
class Measures:
    """What is measured of one joint response.

    Attributes:
        words: Number of words of either text.
        length_ratio: Words of the second text per word of the first, 0 if one has none.
        vocabulary_ratio: Different content words of the second per such word of the first, 0 if one has none.
        transitions: Kinds of transition words in the two together.
        overlap: Jaccard similarity of their content words.
    """

    words: tuple[int, int]
    length_ratio: float
    vocabulary_ratio: float
    transitions: int
    overlap: float


def measure(first: str, second: str) -> Measures:
    """Measures two texts.

    Example:
        >>> measure("Bake bread.", "Then bake good bread, because it is good.")
        Measures(words=(2, 8), length_ratio=4.0, vocabulary_ratio=1.5, transitions=2, overlap=0.6666666666666666)
    """
    lengths = len(words(first)), len(words(second))
    vocabularies = len(content_words(first)), len(content_words(second))
    return Measures(
        words=lengths,
        length_ratio=lengths[1] / lengths[0] if all(lengths) else 0.0,
        vocabulary_ratio=vocabularies[1] / vocabularies[0] if all(vocabularies) else 0.0,
        transitions=len(transition_kinds(first) | transition_kinds(second)),
        overlap=overlap(first, second),
    )


class LevelReward:
    """How many levels two texts reach: limits, length ratio, vocabulary ratio, style. A number in [0, 3].

    With ``band`` being :func:`pbrl_lightning.tasks.writing.band_score`, in [0, 1]::

        limits     = (band(words(first), *first_words) + band(words(second), *second_words)) / 2
        length     = band(words(second) / words(first), *length_ratio)
        vocabulary = band(content(second) / content(first), *vocabulary_ratio)
        style      = (min(1, kinds of transition words / transitions) + band(overlap, *overlap)) / 2

        reward = 0.5 limits + 1.0 length + 1.0 vocabulary + 0.5 style

    A level counts only if each one before it has at least ``threshold``: what does not keep to its limits gains nothing
    by its vocabulary. The limits are 0 if either text has no word.

    Args:
        first_words: Band for the words of the first text.
        second_words: Band for the words of the second.
        length_ratio: Band for words of the second per word of the first.
        vocabulary_ratio: Band for different content words of the second per such word of the first.
        overlap: Band for the Jaccard similarity of the content words.
        transitions: Kinds of transition words (of six) that give the full score.
        threshold: What a level must have for the next to count, in [0, 1].

    Raises:
        ConfigurationError: If a band is not ``0 < low <= high``, or another number is out of its range.
    """

    reward_range: tuple[float, float] = (0.0, 3.0)

    def __init__(
        self,
        first_words: tuple[float, float],
        second_words: tuple[float, float],
        length_ratio: tuple[float, float],
        vocabulary_ratio: tuple[float, float],
        overlap: tuple[float, float],
        transitions: int = 3,
        threshold: float = 0.5,
    ) -> None:
        self.first_words = first_words
        self.second_words = second_words
        self.length_ratio = length_ratio
        self.vocabulary_ratio = vocabulary_ratio
        self.overlap = overlap
        bands = {name: band for name, band in vars(self).items() if not 0 < band[0] <= band[1]}
        wrong = [f"`{name}` must be 0 < low <= high, got {band}" for name, band in bands.items()]
        if not 1 <= transitions <= len(TRANSITIONS):
            wrong.append(f"`transitions` must be 1 to {len(TRANSITIONS)}, got {transitions}")
        if not 0 <= threshold <= 1:
            wrong.append(f"`threshold` must be in [0, 1], got {threshold}")
        raise_together(wrong)
        self.transitions = transitions
        self.threshold = threshold

    def __call__(self, first: list[str], second: list[str]) -> list[float]:
        """Rewards of B joint responses, in [0, 3].

        Raises:
            ConfigurationError: If the lengths differ.
        """
        if len(first) != len(second):
            raise ConfigurationError(f"`second` must have {len(first)} texts, as `first` has, got {len(second)}")
        return [self.score(self.levels(*texts)) for texts in zip(first, second, strict=True)]

    def levels(self, first: str, second: str) -> tuple[float, float, float, float]:
        """The four scores of one joint response, each in [0, 1], whether or not they count."""
        seen = measure(first, second)
        style = min(1.0, seen.transitions / self.transitions) + band_score(seen.overlap, *self.overlap)
        limits = band_score(seen.words[0], *self.first_words) + band_score(seen.words[1], *self.second_words)
        return (
            limits / 2 if all(seen.words) else 0.0,
            band_score(seen.length_ratio, *self.length_ratio),
            band_score(seen.vocabulary_ratio, *self.vocabulary_ratio),
            style / 2,
        )

    def score(self, levels: Sequence[float]) -> float:
        """The reward of four scores: their weighted sum up to and with the first below the threshold."""
        total = 0.0
        for weight, level in zip(_WEIGHTS, levels, strict=True):
            total += weight * level
            if level < self.threshold:
                break
        return total

    def metrics(self, first: list[str], second: list[str]) -> dict[str, float]:
        """Means over B joint responses, for ``data.eval_metrics``: the measures, and the share that reach each level.

        ``length_ratio``, ``vocabulary_ratio``, ``transitions``, ``overlap``; ``within_limits`` (the first level is 1),
        ``levels_reached`` (0 to 4: levels of at least the threshold, before the first that is not). Empty if B is 0.
        """
        if not first:
            return {}
        seen = [measure(*texts) for texts in zip(first, second, strict=True)]
        levels = [self.levels(*texts) for texts in zip(first, second, strict=True)]
        columns: dict[str, Sequence[float]] = {
            "length_ratio": [measures.length_ratio for measures in seen],
            "vocabulary_ratio": [measures.vocabulary_ratio for measures in seen],
            "transitions": [measures.transitions for measures in seen],
            "overlap": [measures.overlap for measures in seen],
            "within_limits": [scores[0] == 1.0 for scores in levels],
            "levels_reached": [self._reached(scores) for scores in levels],
        }
        return {name: sum(values) / len(seen) for name, values in columns.items()}

    def _reached(self, levels: Sequence[float]) -> int:
        return next((place for place, level in enumerate(levels) if level < self.threshold), len(levels))
