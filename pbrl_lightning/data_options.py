"""Which options of a PreferenceDataModule fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pbrl_lightning.agents.prompts import check_prompts
from pbrl_lightning.preferences.replay import CurrentReplay, ReplayBuffer
from pbrl_lightning.preferences.selection import validate_selection
from pbrl_lightning.utils.errors import raise_together

if TYPE_CHECKING:
    from pbrl_lightning.data import PreferenceDataModule
    from pbrl_lightning.modules.base import LearnerModule, TeamModule


def validate_options(
    data: PreferenceDataModule,
    *,
    reward_func: Any,
    eval_items: Any,
    replay: ReplayBuffer | None,
    num_candidates: int | None,
    num_turns: int,
    joint_mode: str,
) -> None:
    """Raises a ValueError that names every option of a data module that does not fit, as given and as resolved."""
    from_files, iterative = data.given_pairs is not None, data.comparator is not None
    old_rounds = replay is not None and not isinstance(replay, CurrentReplay)
    checks = [
        (eval_items is not None and reward_func is None, "`reward_func` must be given with `eval_items`"),
        (
            from_files and (iterative or replay is not None),
            "`pairs` trains on given pairs alone and takes neither `comparator` nor `replay`",
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
        (
            data.val_fraction is not None and not 0 <= data.val_fraction < 1,
            f"`val_fraction` must be in [0, 1), got {data.val_fraction}",
        ),
        (
            bool(data.val_fraction) and data.given_eval_pairs is not None,
            "`val_fraction` and `eval_pairs` exclude each other: hold out a share of `pairs`, or give held-out pairs",
        ),
        (
            data.preference_scoring_reward not in ("task", "reward_model"),
            f"`preference_scoring_reward` must be 'task' or 'reward_model', got {data.preference_scoring_reward!r}",
        ),
        (num_turns != 1, f"`num_turns` must be 1 (single turn), got {num_turns}"),
        (joint_mode != "aligned", f"`joint_mode` must be 'aligned', got {joint_mode!r}"),
    ]
    sizes = {name: getattr(data, name) for name in ("batch_size", "rollout_batch_size", "train_batch_size")}
    problems = [f"`{name}` must be >= 1, got {size}" for name, size in sizes.items() if size is not None and size < 1]
    problems += [message for wrong, message in checks if wrong]
    if data.train_batch_size is not None and data.train_batch_size > data.rollout_batch_size:
        problems.append(
            f"`train_batch_size` must be at most `rollout_batch_size` ({data.rollout_batch_size}), "
            f"got {data.train_batch_size}"
        )
    try:
        validate_selection(data.pair_selection, data.pairs_per_sample, data.iterative)
    except ValueError as error:
        problems.append(str(error))
    raise_together(problems)


def validate_run(data: PreferenceDataModule, module: LearnerModule) -> None:
    """Raises a ValueError that names everything that a module needs of a data module or cannot use."""
    name, has_items, from_files = type(module).__name__, bool(data.items), data.given_pairs is not None
    has_policy, learns = module.policy_stage is not None, module.learned_reward is not None
    pairs_only = module.collects_pairs and not has_policy and data.given_pairs is not None
    collects = module.collects_pairs and not from_files
    fits_alone = module.val_fraction > 0
    checks = [
        (fits_alone and not from_files, f"`pairs` must be given to fit a {name}, which has no team to collect with"),
        (
            not fits_alone and not has_items and not from_files,
            "`items` (with `reward_func`) or `pairs` must be given to fit",
        ),
        (from_files and not module.collects_pairs, f"a {name} learns from rollouts and takes no `pairs`"),
        (
            has_items and pairs_only,
            f"`items` and `pairs` exclude each other for a {name}: collect pairs, or train on given ones",
        ),
        (
            data.batch_size is not None and not module.collects_pairs,
            f"`batch_size` counts pairs, and a {name} has none; `rollout_batch_size` counts its task items",
        ),
        (has_policy and not has_items and from_files, f"a {name} needs `items` for its policy stage besides `pairs`"),
        (
            has_items
            and data.oracle is None
            and ((collects and not fits_alone and data.judge is None) or (has_policy and not learns)),
            "`reward_func` must be given with `items`",
        ),
        (data.judge is not None and not collects, f"`judge` compares candidates, and this {name} collects none"),
        (
            data.judge is not None and data.preference_scoring_reward == "reward_model",
            "`judge` and `preference_scoring_reward: reward_model` exclude each other",
        ),
        (
            data.val_fraction is not None and not module.measures_pairs,
            f"`val_fraction` is for a MADPOModule or JointRewardModule; a {name} trains on all of a round's pairs",
        ),
        (
            data.given_eval_pairs is not None and not module.measures_pairs,
            f"`eval_pairs` is for a MADPOModule or JointRewardModule; a {name} takes none",
        ),
        (
            bool(data.val_fraction) and module.measures_pairs and not from_files,
            "`val_fraction` holds out a share of `pairs`; a run that collects its pairs takes `eval_pairs`",
        ),
        (
            data.preference_scoring_reward == "reward_model"
            and not (data.comparator is not None and module.collects_pairs and learns),
            "`preference_scoring_reward: reward_model` needs a MARLHFModule and a `comparator` (an iterative run)",
        ),
    ]
    problems = [message for wrong, message in checks if wrong]
    raise_together(problems)


def validate_items(data: PreferenceDataModule, module: TeamModule) -> None:
    """Raises a ValueError if there is a task item that the team's templates cannot read."""
    formatters = module.team.formatters if module.team.roles is None else module.team.roles.formatters
    check_prompts(formatters, data.items, "items")
    if data.evaluator is not None:
        check_prompts(formatters, data.evaluator.items, "eval_items")
