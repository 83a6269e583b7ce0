"""Why a round has nothing to train on, in words that say what to check."""

from __future__ import annotations

from pbrl_lightning.preferences.collector import Collection

WHAT_TO_CHECK = (
    "Check that the reward tells responses apart and does not return a constant; a higher `temperature` or `top_p` "
    "makes responses differ, and more `num_candidates` make a difference likelier"
)
NOTHING_LEARNED = "nothing was learned: "


def why_no_pairs(round_number: int, collected: Collection, num_dropped: int, compared: bool) -> str:
    """What is said after a round that has no pairs to train on.

    Args:
        round_number: 1-based.
        collected: The whole round.
        num_dropped: Candidates without a finite score so far.
        compared: Whether the agents' responses were compared with a comparator's.
    """
    start = f"round {round_number} has no pairs to train on, and passes without an update: "
    if collected.pairs:
        return (
            f"{start}{len(collected.pairs)} pairs were collected, and none of them can be trained on. Replay chose "
            "none, or winner and loser have the same tokens after they were cut"
        )
    sides = [("joint responses", collected.actor_rewards)]
    if compared:
        sides.append(("comparator's joint responses", collected.comparator_rewards))
    for name, rewards in sides:
        if not rewards:
            dropped = f" ({num_dropped} candidates have no finite score so far)" if num_dropped else ""
            return (
                f"{start}no score of the {name}{dropped}. Check that the reward returns finite numbers, "
                "and for the comparator's side that it answers"
            )
    rewards = [reward for _, side in sides for reward in side]
    if min(rewards) == max(rewards):
        scores = f"all {len(rewards)} joint responses have the score {rewards[0]:g}"
    else:
        scores = (
            f"the scores, from {min(rewards):g} to {max(rewards):g}, differ between task items but not within a "
            "comparison"
        )
    return f"{start}{scores}, and a tie makes no pair. {WHAT_TO_CHECK}"
