"""Names that may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], most: int = 2) -> list[str]:
    """The known names that a wrong one is nearest to, dotted paths by their last part too.

    Args:
        name: As it was given.
        known: Names that exist.
        most: How many to return.

    Example:
        >>> nearest("HistoryComparater", ["CurrentComparator", "HistoryComparator"])
        ['HistoryComparator']
        >>> nearest("learning_rat", ["model.init_args.learning_rate", "data.seed"])
        ['model.init_args.learning_rate']
        >>> nearest("num_cand", ["num_candidates", "seed"])  # an abbreviation
        ['num_candidates']
    """
    short = {path: path.replace(".init_args", "") for path in known}
    wanted = name.replace(".init_args", "")
    last = wanted.rpartition(".")[2]
    alike = {path: _likeness(wanted, whole) for path, whole in short.items()}
    by_last = {path: _likeness(last, whole.rpartition(".")[2]) for path, whole in short.items()}
    scores = {path: max(alike[path], by_last[path] - 0.1) for path in short}
    scores |= {path: 0.9 for path, whole in short.items() if whole.startswith(wanted) and len(wanted) > 2}
    best = max(scores.values(), default=0.0)
    near = [path for path, score in scores.items() if score >= 0.75 and score >= best - 0.02]
    return sorted(near, key=lambda path: (-scores[path], len(path)))[:most]


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first.lower(), second.lower()).ratio()


def hint(near: Iterable[str]) -> str:
    """A question to put after a message; empty without a near name.

    Example:
        >>> hint(["fit"])
        '; did you mean `fit`?'
    """
    names = " or ".join(f"`{name}`" for name in near)
    return f"; did you mean {names}?" if names else ""
