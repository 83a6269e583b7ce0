"""Joint responses to be looked at: with their scores, in tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from pbrl_lightning.batches import EvaluationBatch, PreferencePair, TeamSample

Cell = str | float | int | None

TABLE_WIDTH: Final = 96
"""Characters of a line of a wrapped table; TensorBoard shows so many on a screen of 1400 pixels."""
SHORT_CELL: Final = 24
"""Characters of the longest line in a column that is not one of long texts."""
SHORT_WIDTH: Final = 14
"""Characters at which such a column is wrapped in a table that is too wide."""
NARROWEST: Final = 20
"""Characters that a column of long texts has in any case."""
MOST_LINES: Final = 24
"""Lines of a text that are shown in a wrapped table."""

_MARKUP: Final = re.compile(r"[^\w\s.,:;?/%=@…-]|_|\\")


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
    """Column names and rows: item, side (where there are sides), reward, prompt and a column per agent."""
    num_agents = max((len(sample.completions) for sample in samples), default=0)
    sided = any(sample.side for sample in samples)
    columns = ["item", *(["side"] if sided else []), "reward", "prompt", *(f"agent {i}" for i in range(num_agents))]
    rows: list[list[Cell]] = [
        [
            sample.item,
            *([sample.side] if sided else []),
            sample.reward,
            joint_prompt(sample.prompts),
            *sample.completions,
        ]
        for sample in samples
    ]
    return columns, rows


def joint_prompt(prompts: Sequence[str]) -> str:
    r"""The prompts of ``N`` agents as one text: once if they are all the same.

    Example:
        >>> joint_prompt(["Name a fruit.", "Name a color."])
        'agent 0: Name a fruit.\nagent 1: Name a color.'
    """
    if len(set(prompts)) <= 1:
        return "".join(prompts[:1])
    return "\n".join(f"agent {agent}: {prompt}" for agent, prompt in enumerate(prompts))


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
        return " ".join(cell_text(value).replace("|", "\\|").splitlines())

    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)])


def cell_text(value: Cell) -> str:
    """A cell as text; a hyphen for None, floats with three decimals."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def wrapped_cells(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[list[list[str]]]:
    """A table whose texts are wrapped by words and folded where they are long.

    Args:
        columns: Names.
        rows: One cell per column.

    Returns:
        Rows of cells of lines, the names first. If the table would be wider than :data:`TABLE_WIDTH`, columns of long
        texts share what the short ones leave of it.
    """
    texts = [list(columns), *([cell_text(value) for value in row] for row in rows)]
    widths = _column_widths([max(map(_line_length, column)) for column in zip(*texts, strict=True)])
    return [[_wrapped(text, width) for text, width in zip(row, widths, strict=True)] for row in texts]


def _column_widths(longest: Sequence[int]) -> list[int]:
    """Characters per column, from those of its longest line."""
    if sum(longest) <= TABLE_WIDTH:
        return list(longest)
    num_long = sum(length > SHORT_CELL for length in longest)
    left = TABLE_WIDTH - sum(min(length, SHORT_WIDTH) for length in longest if length <= SHORT_CELL)
    return [max(NARROWEST, left // num_long) if length > SHORT_CELL else min(length, SHORT_WIDTH) for length in longest]


def _line_length(text: str) -> int:
    return max([1, *map(len, text.expandtabs(4).splitlines())])


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters; of a text that needs more than ``MOST_LINES`` its beginning and end."""
    options = {"width": width, "replace_whitespace": False, "drop_whitespace": True, "break_on_hyphens": False}
    lines = [line for part in text.splitlines() for line in (textwrap.wrap(part.expandtabs(4), **options) or [""])]  # type: ignore[arg-type]
    hidden = len(lines) - MOST_LINES
    if hidden <= 0:
        return lines or [""]
    half = MOST_LINES // 2
    return [*lines[:half], f"… {hidden} lines …", *lines[-half:]]


def wrapped_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as Markdown for TensorBoard, its lines broken by words, and nothing in its texts taken for markup.

    TensorBoard breaks words of narrow columns anywhere, but not inside of ``<pre>``.

    Example:
        >>> print(wrapped_table(["reward", "agent 0"], [[0.5, "*yes*"]]))
        | <pre>reward</pre> | <pre>agent 0</pre> |
        |---|---|
        | <pre>0.500</pre> | <pre>&#42;yes&#42;</pre> |
    """
    lines = [
        "| " + " | ".join(f"<pre>{'<br>'.join(map(_escaped, cell))}</pre>" for cell in row) + " |"
        for row in wrapped_cells(columns, rows)
    ]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def _escaped(text: str) -> str:
    """Every character that Markdown or HTML could take for markup as a reference to it."""
    return _MARKUP.sub(lambda character: f"&#{ord(character[0])};", text)
