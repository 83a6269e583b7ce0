"""Why a row does not learn, found by looking at its runs; shown only where the numbers say that it does not."""

from __future__ import annotations

from typing import Final

_NO_LETTER: Final = (
    "its pairs are collected once, from a team that says some eight letters about equally often. Winners agree on any of "
    "them, so each agent alone finds the same letters among its winners as among its losers, and nothing tells it which "
    "one to say. In rounds each collection starts from what the last one happened to favour, and the tie breaks"
)
_NEVER_UP: Final = (
    "its advantage is never above 0: it pushes down what was sampled below the best of its group, and pulls nothing up. "
    "Without a top-k filter, which it needs (see [policy learning](policy_learning.md)), the untrained team agrees once in "
    "a hundred times, so that most groups have no best response, and no gradient"
)
WHY: Final[dict[str, str]] = {
    "sparse/MADPO": f"{_NO_LETTER}.",
    "sparse/MAReMax": f"{_NEVER_UP}.",
    "dense/MADPO": (
        "the pairs are collected once: as with the sparse reward, for each agent alone winners and losers hold much the same "
        "letters. What is left to learn is to stay in the middle of the alphabet, near whatever the other one says; two seeds "
        "gain by it and one does not."
    ),
}
"""By the row's name."""
