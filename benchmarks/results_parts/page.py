"""The tables and commands of docs/results.md, between its markers; the prose around them is written by hand."""

from __future__ import annotations

import re
from typing import Any

from .plots import file_name, grouped
from .rows import ROWS, TABLES
from .summary import Summary, summaries
from .why import WHY

HEADER = """\
| run | untrained | trained | gain | error | samples | time | learns |
|---|---|---|---|---|---|---|---|
"""


def render(page: str, results: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The page with everything between its markers made anew.

    Raises:
        ValueError: If a table has no place in the page.
    """
    for table in TABLES:
        rows = summaries([row for row in ROWS if row.table == table], results)
        parts = (("pictures", _pictures(table, rows)), ("table", _table(rows)), ("commands", _commands(rows)))
        for part, made in parts:
            marker = f"{table} {part}"
            between = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- end -->)", re.DOTALL)
            if not between.search(page):
                raise ValueError(f"docs/results.md must have `<!-- {marker} -->` and `<!-- end -->` after it")
            page = between.sub(lambda found, made=made: f"{found[1]}\n{made}\n{found[2]}", page)
    return page


def _pictures(table: str, rows: list[Summary]) -> str:
    lines = [
        f"![Evaluation reward against joint responses sampled: {group}](pictures/{file_name(table, group)})"
        for group in grouped(rows)
    ]
    return "\n".join(lines) + "\n"


def _table(rows: list[Summary]) -> str:
    text = HEADER + "\n".join(map(_line, rows))
    there = [run for row in rows for run in row.runs]
    machines = sorted({run["hardware"] for run in there})
    if machines:
        text += f"\n\nHardware: {'; '.join(machines)}. Seeds: {_seeds(rows)}."
    notes = [f"- **{row.row.title}**: {WHY.get(row.row.name, NO_REASON)}" for row in rows if _needs_reason(row)]
    return text + ("\n\n" + "\n".join(notes) if notes else "") + "\n"


NO_REASON = "no reason is known yet."


def _needs_reason(row: Summary) -> bool:
    """What does not learn, and a control that does."""
    return row.complete and row.learns == row.row.control


def _line(summary: Summary) -> str:
    row = summary.row
    if not summary.runs:
        return f"| {row.title} | | | | | | | not run yet |"
    gain, (samples, _), (seconds, _) = summary.of("gain")[0], summary.of("samples"), summary.of("seconds")
    verdict = "yes" if summary.learns else "no"
    if not summary.complete:
        verdict = f"{len(summary.runs)} of {len(row.seeds)} seeds so far"
    elif row.control:
        verdict += ", as it must not" if not summary.learns else ", and must not"
    before, after = (f"{mean:.3f} ± {std:.3f}" for mean, std in (summary.of("before"), summary.of("after")))
    return (
        f"| {row.title} | {before} | {after} | {gain:+.3f} | {summary.error:.3f} | {samples:.0f} | {seconds:.0f} s | "
        f"{verdict} |"
    )


def _seeds(rows: list[Summary]) -> str:
    """Which seeds were run."""
    return ", ".join(map(str, sorted({run["seed"] for row in rows for run in row.runs})))


def _commands(rows: list[Summary]) -> str:
    lines = [f"# {summary.row.title}\n{summary.row.command(0)}" for summary in rows]
    return "```bash\n" + "\n".join(lines) + "\n```\n"
