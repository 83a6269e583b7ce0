"""A module from a checkpoint: ``load_from_checkpoint``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pbrl_lightning.agents.adapters import LoraOptions
from pbrl_lightning.agents.reference import ReferenceKL
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.checkpoints import read_checkpoint
from pbrl_lightning.models.critic import Critic
from pbrl_lightning.models.scalar import ScalarModel
from pbrl_lightning.utils.errors import ConfigurationError
from pbrl_lightning.utils.options import LEFT_OUT, decode, encode, given_options, is_plain

if TYPE_CHECKING:
    from pbrl_lightning.modules.base import LearnerModule

    M = TypeVar("M", bound=LearnerModule)

_CLASSES = (LoraOptions, ReferenceKL, Critic, ScalarModel)


def saved_options(module: LearnerModule) -> dict[str, Any]:
    """What a checkpoint holds of a module's and its team's options; plain data without keys and models."""
    given = given_options(module)
    team = given.pop("team", None)
    return {
        "class": type(module).__name__,
        "init_args": _encoded(given),
        "team": _encoded(given_options(team)) if team is not None else None,
    }


def _encoded(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: encode(value, name) for name, value in options.items()}


def drop_objects(checkpoint: dict[str, Any]) -> None:
    """Leaves out what Lightning's ``save_hyperparameters`` of a user's own class put in and would not load again."""
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in checkpoint:
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if is_plain(value)}


def load_module(kind: type[M], path: str | Path, map_location: Any, given: Mapping[str, Any]) -> M:
    """Makes a module as its checkpoint says, and puts the checkpoint's weights into it.

    Args:
        kind: Its class.
        path: The checkpoint, or a run's directory for its newest one.
        map_location: As in ``torch.load``.
        given: Arguments of the class that replace the saved ones.

    Raises:
        ConfigurationError: If the checkpoint is another class's, or does not hold what is needed; says what to give.
    """
    file, checkpoint = read_checkpoint(path, map_location)
    saved = checkpoint.get("options")
    parameters = inspect.signature(kind.__init__).parameters
    unknown = sorted(set(given) - set(parameters))
    if unknown:
        raise ConfigurationError(f"{kind.__name__} has no option {', '.join(f'`{name}`' for name in unknown)}")
    if saved is not None and saved["class"] != kind.__name__ and saved["class"] in _names_of_ours():
        raise ConfigurationError(
            f"{file} is a checkpoint of a {saved['class']}: call {saved['class']}.load_from_checkpoint"
        )
    options = dict(given)
    for name, spec in (saved["init_args"] if saved is not None else {}).items():
        no_schedule = name == "lr_scheduler" and isinstance(spec, Mapping) and LEFT_OUT in spec
        if name in parameters and name not in options and not no_schedule:
            options[name] = decode(spec, _CLASSES, name)
    if "team" in parameters and "team" not in options:
        options["team"] = AgentTeam.from_checkpoint(file)
    needed = [name for name, one in parameters.items() if one.default is one.empty and name != "self"]
    missing = [name for name in needed if name not in options]
    if missing:
        raise ConfigurationError(f"{file} was written by a version that kept no options: give `{missing[0]}=`")
    module = kind(**options)
    module.settle_dtype(checkpoint.get("dtype"))
    module.restore(checkpoint)
    return module


def _names_of_ours() -> tuple[str, ...]:
    return ("MADPOModule", "MARLModule", "MARLHFModule", "JointRewardModule")
