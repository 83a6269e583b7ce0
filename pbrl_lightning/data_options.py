"""Which options of a PreferenceDataModule fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pbrl_lightning.preferences.replay import CurrentReplay, ReplayBuffer
from pbrl_lightning.preferences.selection import validate_selection

if TYPE_CHECKING:
    from pbrl_lightning.data import PreferenceDataModule


def validate_options(
    data: PreferenceDataModule,
    *,
    items: Any,
    reward_func: Any,
    eval_items: Any,
    replay: ReplayBuffer | None,
    num_candidates: int | None,
    num_turns: int,
    joint_mode: str,
) -> None:
    """Raises a ValueError that names every option of a data module that does not fit, as given and as resolved."""
    from_files, iterative = data.pair_paths is not None, data.comparator is not None
    old_rounds = replay is not None and not isinstance(replay, CurrentReplay)
    checks = [
        (items is not None and reward_func is None, "`reward_func` must be given with `items`"),
        (eval_items is not None and reward_func is None, "`reward_func` must be given with `eval_items`"),
        (items is not None and from_files, "`items` and `pairs` exclude each other: collect pairs, or train on files"),
        (
            from_files and (iterative or replay is not None),
            "`pairs` trains on files alone and takes neither `comparator` nor `replay`",
        ),
        (
            old_rounds and not iterative,
            "`replay` draws from earlier rounds and needs a `comparator` (an iterative run)",
        ),
        (
            num_candidates is not None and num_candidates < 1,
            f"`num_candidates` must be >= 1, got {num_candidates}",
        ),
        (
            not iterative and not from_files and data.num_candidates < 2,
            "`num_candidates` must be >= 2 without a comparator: one candidate makes no pair",
        ),
        (data.batch_size < 1, f"`batch_size` must be >= 1, got {data.batch_size}"),
        (num_turns != 1, f"`num_turns` must be 1 (single turn), got {num_turns}"),
        (joint_mode != "aligned", f"`joint_mode` must be 'aligned', got {joint_mode!r}"),
    ]
    problems = [message for wrong, message in checks if wrong]
    try:
        validate_selection(data.pair_selection, data.pairs_per_sample, data.iterative)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
