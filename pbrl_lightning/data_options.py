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
    problems = []
    for name, given in (("items", items), ("eval_items", eval_items)):
        if given is not None and reward_func is None:
            problems.append(f"`reward_func` must be given with `{name}`")
    if items is not None and data.pair_paths is not None:
        problems.append("`items` and `pairs` exclude each other: collect pairs, or train on files")
    if data.pair_paths is not None and (data.comparator is not None or replay is not None):
        problems.append("`pairs` trains on files alone and takes neither `comparator` nor `replay`")
    if replay is not None and not isinstance(replay, CurrentReplay) and data.comparator is None:
        problems.append("`replay` draws from earlier rounds and needs a `comparator` (an iterative run)")
    if num_candidates is not None and num_candidates < 1:
        problems.append(f"`num_candidates` must be >= 1, got {num_candidates}")
    if data.comparator is None and data.num_candidates < 2 and data.pair_paths is None:
        problems.append("`num_candidates` must be >= 2 without a comparator: one candidate makes no pair")
    if data.batch_size < 1:
        problems.append(f"`batch_size` must be >= 1, got {data.batch_size}")
    if num_turns != 1:
        problems.append(f"`num_turns` must be 1 (single turn), got {num_turns}")
    if joint_mode != "aligned":
        problems.append(f"`joint_mode` must be 'aligned', got {joint_mode!r}")
    try:
        validate_selection(data.pair_selection, data.pairs_per_sample, data.iterative)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
