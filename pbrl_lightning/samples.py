"""Joint responses to be looked at: with their scores, in tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pbrl_lightning.batches import EvaluationBatch, PreferencePair, TeamSample

Cell = str | float | int | None


@dataclass(frozen=True)
class JointSample:
    """One joint response of ``N`` agents.

    Attributes:
        item: What tells its task item from the others.
        side: Which side of a comparison it is; empty outside of comparisons.
        prompts: ``N`` prompt texts.
        completions: ``N`` response texts.
        reward: Its score; None where it has none.
    """

    item: int
    side: str
    prompts: list[str]
    completions: list[str]
    reward: float | None


def evaluated_samples(batch: EvaluationBatch) -> list[JointSample]:
    """The joint responses of an evaluation."""
    rows = [(sample, index) for sample in batch.samples for index in sample.joint_indices]
    return [
        JointSample(
            sample.item_index, "", sample.prompts, sample.completions(index), None if reward != reward else reward
        )
        for (sample, index), reward in zip(rows, batch.rewards.tolist(), strict=True)
    ]


def response_tokens(sample: TeamSample) -> list[list[int]]:
    """Tokens of each joint response, ``N`` lists of counts, EOS included.

    Empty where tokens belong to no single agent, or where they are not known.
    """
    lengths = [[len(responses[index].token_ids) for index in sample.joint_indices] for responses in sample.responses]
    return lengths if not sample.joint_tokens and any(map(any, lengths)) else []


def mean_lengths(response_tokens: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean tokens of a response as ``response_length/agent_0`` …, for agents that have any."""
    return {
        f"response_length/agent_{agent}": sum(counts) / len(counts)
        for agent, counts in enumerate(response_tokens)
        if counts
    }


def evaluated_lengths(batch: EvaluationBatch) -> dict[str, float]:
    """:func:`mean_lengths` of an evaluation."""
    samples = [tokens for sample in batch.samples if (tokens := response_tokens(sample))]
    return mean_lengths([list(chain.from_iterable(agent)) for agent in zip(*samples, strict=True)])


def pair_samples(pairs: Sequence[PreferencePair], num_items: int) -> list[JointSample]:
    """Winner and loser of the first pair of each of the first task items that have one.

    Args:
        pairs: In item order.
        num_items: Most items.

    Returns:
        Two samples per item, the winner first; items are numbered as they come.
    """
    first: dict[tuple[str, ...], PreferencePair] = {}
    for pair in pairs:
        if len(first) == num_items and tuple(pair.prompts) not in first:
            break
        first.setdefault(tuple(pair.prompts), pair)
    samples = []
    for number, pair in enumerate(first.values()):
        winner, loser = _sides(pair)
        samples.append(JointSample(number, winner, pair.prompts, pair.winner_completions, pair.winner_reward))
        samples.append(JointSample(number, loser, pair.prompts, pair.loser_completions, pair.loser_reward))
    return samples


def _sides(pair: PreferencePair) -> tuple[str, str]:
    if not pair.raw_rewards:
        return "winner", "loser"
    # Scores that differ after the processor differed before it.
    current_won = pair.raw_rewards[0] == pair.target_raw_reward
    names = ("current agents", "comparator") if current_won else ("comparator", "current agents")
    return f"winner: {names[0]}", f"loser: {names[1]}"


def table_of(samples: Sequence[JointSample]) -> tuple[list[str], list[list[Cell]]]:
    """Column names and rows: item, side (where there are sides), reward and a column per agent."""
    num_agents = max((len(sample.completions) for sample in samples), default=0)
    sided = any(sample.side for sample in samples)
    columns = ["item", *(["side"] if sided else []), "reward", *(f"agent {agent}" for agent in range(num_agents))]
    rows: list[list[Cell]] = [
        [sample.item, *([sample.side] if sided else []), sample.reward, *sample.completions] for sample in samples
    ]
    return columns, rows


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as Markdown; texts become one line, and a bar in them no end of a cell.

    Example:
        >>> print(markdown_table(["reward", "agent 0"], [[0.5, "yes"], [None, "no"]]))
        | reward | agent 0 |
        |---|---|
        | 0.500 | yes |
        | - | no |
    """

    def cell(value: Cell) -> str:
        if isinstance(value, str):
            return " ".join(value.replace("|", "\\|").splitlines())
        if value is None:
            return "-"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)])
