"""Which logged numbers ``ModelCheckpoint`` and ``EarlyStopping`` can monitor in a run."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint

if TYPE_CHECKING:
    from pbrl_lightning.agents.team import AgentTeam
    from pbrl_lightning.data import PreferenceDataModule
    from pbrl_lightning.modules.base import LearnerModule

_OF_ROUNDS = (
    "iter/current_iteration",
    "iter/current_preference_pairs",
    "iter/train_preference_pairs",
    "iter/total_preference_pairs",
    "collect/seconds",
    "collect/tokens_per_second",
    "collect/reward_mean",
    "collect/reward_standard_error",
    "collect/dropped_candidates",
)
_OF_COMPARISONS = (
    "collect/comparator_reward_mean",
    "collect/comparator_reward_standard_error",
    "collect/win_rate",
    "collect/win_rate_standard_error",
    "collect/tie_rate",
)
_OF_EVALUATIONS = tuple(f"eval/turn_1/{name}" for name in ("reward_mean", "expected_return", "reward_standard_error"))
_BY_AGENT = (
    "train/margin",
    "train/logps/chosen",
    "train/logps/rejected",
    "train/response_length/chosen",
    "train/response_length/rejected",
    "policy/logp",
    "policy/response_length",
    "policy/kl",
)
"""Of what is logged of a batch, what is logged of each agent too, as ``NAME/agent_0`` …"""


def metric_names(module: LearnerModule, data: PreferenceDataModule) -> list[str]:
    """Names of what every run of this kind logs; your own metrics and counts of rare events come on top."""
    names = _names_of_team(module, data)
    team: AgentTeam | None = getattr(module, "team", None)
    agents = [f"agent_{agent}" for agent in range(team.num_agents)] if team is not None else []
    names += [f"{name}/{agent}" for name in names if name in _BY_AGENT for agent in agents]
    lengths = ["collect"] * _collects(module, data) + ["eval"] * evaluates(module, data)
    names += [f"{stage}/response_length/{agent}" for stage in lengths for agent in agents]
    return names + [f"train/grad_norm/{group}" for group in (*agents, *_other_groups(module))]


def _names_of_team(module: LearnerModule, data: PreferenceDataModule) -> list[str]:
    """Names without those per agent."""
    names = [*module.step_metrics, "train/grad_norm", "train/tokens_per_second", "env_step"]
    if _collects(module, data):
        counts = [f"collect/{name}" for name in module.counts()]
        names += [*_OF_ROUNDS, *(_OF_COMPARISONS if data.comparator is not None else ()), *counts]
    if evaluates(module, data):
        names += _OF_EVALUATIONS
    if validates_pairs(module, data):
        names += module.held_out_names
    return list(dict.fromkeys(names))


def _collects(module: LearnerModule, data: PreferenceDataModule) -> bool:
    return module.collects_pairs and data.given_pairs is None


def _other_groups(module: LearnerModule) -> list[str]:
    """Parameter groups of the optimizer that are no agents."""
    learner = module.policy_stage
    reward = ["reward"] if module.learned_reward is not None and module.collects_pairs else []
    critic = ["critic"] if learner is not None and learner.critic is not None else []
    return [*critic, *reward] if has_team(module) else ["reward"]


def evaluates(module: LearnerModule, data: PreferenceDataModule) -> bool:
    """True if the agents of a run are evaluated on held-out task items."""
    return data.evaluator is not None and has_team(module)


def has_team(module: LearnerModule) -> bool:
    """True if the module trains a team."""
    return hasattr(module, "team")


def validates_pairs(module: LearnerModule, data: PreferenceDataModule) -> bool:
    """True if a fit validates on held-out pairs."""
    share = module.val_fraction if data.val_fraction is None else data.val_fraction
    given = data.given_eval_pairs is not None or (data.given_pairs is not None and share > 0)
    return module.measures_pairs and given


def monitors_evaluation(trainer: L.Trainer) -> bool:
    """True if a callback of the run monitors what an evaluation logs."""
    return any(name.startswith("eval/") for _, name in _monitoring(trainer))


def monitor_problems(trainer: L.Trainer, module: LearnerModule, data: PreferenceDataModule) -> list[str]:
    """One sentence per callback that monitors what is not logged, or not logged yet when it first asks."""
    names, listed = metric_names(module, data), _names_of_team(module, data)
    problems = []
    for callback, name in _monitoring(trainer):
        this = f"`{type(callback).__name__}(monitor={name!r})`"
        own = ("epoch", "step") if isinstance(callback, ModelCheckpoint) else ()
        if name not in (*names, *own):
            if not _may_be_logged(name, trainer, module, data):
                problems.append(f"{this} monitors what this run does not log{_instead(name, names, listed)}")
        elif isinstance(callback, EarlyStopping) and callback.strict and _comes_later(name, module):
            problems.append(
                f"{this} asks after the first epoch of the reward model, when no rollout is logged yet; "
                "set `strict=False`"
            )
    return problems


def _monitoring(trainer: L.Trainer) -> Iterator[tuple[L.Callback, str]]:
    """Callbacks that monitor something, and what."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (ModelCheckpoint, EarlyStopping)) and callback.monitor is not None:
            yield callback, callback.monitor


def _may_be_logged(name: str, trainer: L.Trainer, module: LearnerModule, data: PreferenceDataModule) -> bool:
    """True if code of the user's own, or a callback that chooses its names itself, may log it."""
    if name.startswith("eval/"):
        return evaluates(module, data) and data.evaluator is not None and data.evaluator.metrics is not None
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if name.startswith("lr-"):
        return any(isinstance(callback, LearningRateMonitor) for callback in callbacks)
    known = ("lightning.", "pytorch_lightning.", "pbrl_lightning.")
    foreign = (type(one) for one in (module, *callbacks))
    return any(not kind.__module__.startswith(known) or issubclass(kind, LambdaCallback) for kind in foreign)


def _comes_later(name: str, module: LearnerModule) -> bool:
    """True if a run fits a reward model first and logs this in its policy phase."""
    learner = module.policy_stage
    return learner is not None and module.collects_pairs and name in learner.step_metrics


def _instead(name: str, names: list[str], listed: list[str]) -> str:
    near = get_close_matches(name, names, 1, 0.8)
    guess = f" (did you mean `{near[0]}`?)" if near else ""
    agents = ", and values per agent" if len(names) > len(listed) else ""
    evaluation = "; `eval/…` needs `eval_items` and `reward_func`" if name.startswith("eval/") else ""
    return f"{guess}; it can monitor {', '.join(listed)}{agents}{evaluation}"
