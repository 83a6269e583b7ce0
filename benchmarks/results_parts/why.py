"""Why a row does not learn, found by looking at its runs; shown only where the numbers say that it does not."""

from __future__ import annotations

from typing import Final

WHY: Final[dict[str, str]] = {
    "sparse/MADPO": (
        "its pairs are collected once, from a team that says some eight letters about equally often. Winners agree on "
        "any of them, so each agent alone finds the same letters among its winners as among its losers, and nothing "
        "tells it which one to say. In rounds each collection starts from what the last one happened to favour."
    ),
    "sparse/MARLHF": (
        "its policy finds what the reward model gets wrong. Fitted once, to pairs of the untrained team, the model is "
        "right on 86 % of other such pairs (seed 0); as the policy learns, the model's reward of what it says rises "
        "from -2.9 to 2.5, and the task's falls. In rounds, below, pairs of the learned policy put the model right."
    ),
    "sparse/MAReMax": (
        "its advantage is never above 0: it pushes down what was sampled below the best of its group, and pulls up "
        "nothing. It must sample without a top-k filter ([policy learning](policy_learning.md)), and then the "
        "untrained team agrees once in a hundred times: most groups are all alike and have no gradient."
    ),
    "writing/MARLHF": (
        "all three seeds gain, but not by two errors: the policy phase is of a dozen updates on a reward model of 48 "
        "pairs. With five epochs of it instead of two the policy went on to what the reward model gets wrong "
        "(seed 0: from 1.27 to 1.10)."
    ),
    "writing/iterative_MARLHF": (
        "as above: two rounds, each with a reward model of 36 pairs and six policy updates after it. The tiny team's "
        "row has eighty times as many responses; MADPO learns from as few pairs as these."
    ),
}
"""By the row's name."""
