"""What stands at the top of a report: a run's name, models, options, and what its time was spent on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from pbrl_lightning.cards import facts
from pbrl_lightning.cards.names import ModelName, model_name
from pbrl_lightning.cards.page import Facts
from pbrl_lightning.curves import Curve
from pbrl_lightning.hyperparameters import run_options
from pbrl_lightning.importing import import_object
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.modules.base import LearnerModule, TeamModule
from pbrl_lightning.timing import ACTIVITIES, Activity

if TYPE_CHECKING:
    from pbrl_lightning.data import PreferenceDataModule


def models(module: LearnerModule) -> list[str]:
    """The models of a run in Markdown: one line, or one per agent where they differ, then the reward model."""
    lines = []
    if isinstance(module, TeamModule):
        team = module.team
        names = [_source(team.given_name(agent), team.source_name(agent)) for agent in range(team.num_agents)]
        words = [name.words for name in names]
        if len(set(words)) == 1:
            lines.append(f"{words[0]}, {len(words)} agent{'s' * (len(words) > 1)}")
        else:
            lines += [f"agent {agent}: {name}" for agent, name in enumerate(words)]
    if (reward := reward_model(module)) is not None:
        lines.append(f"reward model: {_source(reward.given_name, None).words}")
    return lines


def reward_model(module: LearnerModule) -> JointRewardModel | None:
    """The reward model that a run fits or reads."""
    return getattr(module, "reward_model", None) or module.learned_reward


def _source(given: str | None, calls_itself: str | None) -> ModelName:
    return model_name(given or calls_itself, in_memory=given is None)


def options(
    trainer: L.Trainer, module: LearnerModule, data: PreferenceDataModule, num_evaluated: int
) -> list[tuple[str, Facts]]:
    """The options that matter by heading, each with its value in Markdown.

    Args:
        trainer: The run's.
        module: What was trained.
        data: What it was trained on.
        num_evaluated: Evaluation items of each evaluation.
    """
    results = facts.RunResults(samples=num_evaluated)
    groups = [
        ("Training", facts.training(trainer, module, data)),
        ("Task items and pairs", facts.items(module, data, results)),
        ("Reward", facts.reward(module, data)),
        ("Versions", facts.versions()),
    ]
    return [(heading, [fact for fact in group if fact[1]]) for heading, group in groups if group]


def configuration(trainer: L.Trainer) -> tuple[str, str]:
    """What was set and all options, both as YAML; what was set is only known of runs from the command line.

    Configurations refuse keys of APIs, and those of objects in memory are masked.
    """
    saver = next((c for c in trainer.callbacks if isinstance(c, SaveConfigCallback)), None)  # type: ignore[attr-defined]
    if saver is None:
        return "", _yaml(run_options(trainer, trainer.lightning_module))
    changed, complete = (
        yaml.safe_load(saver.parser.dump(saver.config, skip_default=short, skip_unset=short, skip_validation=True))
        for short in (True, False)
    )
    return _yaml(without_defaults(changed)), _yaml(complete)


def _yaml(values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""


def without_defaults(values: Any) -> Any:
    """A configuration without arguments of classes that are the default, and without mappings that hold nothing.

    The parser itself knows no defaults of a class that is given by name.

    Example:
        >>> without_defaults({"lora": {"class_path": "pbrl_lightning.LoraOptions", "init_args": {"r": 4, "alpha": 32}}})
        {'lora': {'class_path': 'pbrl_lightning.LoraOptions', 'init_args': {'r': 4}}}
    """
    if not isinstance(values, dict):
        return values
    defaults = _defaults(values["class_path"]) if isinstance(values.get("class_path"), str) else {}
    given = values.get("init_args")
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if name not in defaults or defaults[name] != value}
        values = {**values, "init_args": given}
    kept = {name: without_defaults(value) for name, value in values.items()}
    return {name: value for name, value in kept.items() if value != {}}


def _defaults(class_path: str) -> dict[str, Any]:
    """Defaults of a class's arguments by name."""
    try:
        parameters = inspect.signature(import_object(class_path)).parameters.values()
    except ValueError:  # a class without a signature
        return {}
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def phases(curves: Mapping[str, Curve], pending: Mapping[Activity, float], total: float) -> dict[str, float]:
    """Seconds by activity over a whole run, longest first; what none of them accounts for is ``other``, at the end.

    Args:
        curves: Of the run; each round logged its own seconds as ``time/sampling`` ….
        pending: Seconds by activity since the last round ended.
        total: Of the run.
    """
    spent = {
        activity: (curves[name].total if (name := f"time/{activity}") in curves else 0.0) + pending.get(activity, 0.0)
        for activity in ACTIVITIES
    }
    named = sorted(((name, seconds) for name, seconds in spent.items() if seconds > 0), key=lambda part: -part[1])
    return {**dict(named), "other": max(0.0, total - sum(spent.values()))}
