"""A team from a checkpoint: its options, then its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pbrl_lightning.acceleration.precision import AUTO
from pbrl_lightning.agents.adapters import LoraOptions
from pbrl_lightning.agents.prompts import ChatTemplate, PromptTemplate
from pbrl_lightning.agents.roles import JointAdapter
from pbrl_lightning.utils.errors import ConfigurationError
from pbrl_lightning.utils.options import decode, imported_already

TEAM = "team"
"""Where a module, and so a checkpoint, has its team."""

_CLASSES = (LoraOptions, JointAdapter, PromptTemplate, ChatTemplate)
_OTHERS_ADAPTER = re.compile(r"\.lora_\w+\.(?!agent_\d)\w+")
"""An adapter of a reward model or critic on the team's backbone."""


def team_options(checkpoint: Mapping[str, Any], path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the team that a checkpoint was written for.

    Args:
        checkpoint: As loaded.
        path: Where from, for errors.
        given: Arguments that replace the saved ones.

    Raises:
        ConfigurationError: If they are not there; says what to give.
    """
    saved = checkpoint.get("options")
    if saved is None:
        raise ConfigurationError(
            f"{path} was written by a version that kept no options: give `team=`, an AgentTeam with the options of "
            "its run"
        )
    if saved[TEAM] is None:
        raise ConfigurationError(f"{path} is a checkpoint of a {saved['class']}, which has no team")
    options = dict(given)
    for name, spec in saved[TEAM].items():
        if name not in options:
            options[name] = decode(spec, _CLASSES, name)
            if name == "formatters":
                options[name] = _formatters(options[name])
    if options.get("dtype") == AUTO:  # as the run chose, whatever this machine would
        options["dtype"] = checkpoint.get("dtype") or AUTO
    return options


def load_team_weights(team: nn.Module, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Puts a checkpoint's agents into a loaded team.

    Raises:
        ConfigurationError: If they are those of another team.
    """
    prefix = f"{TEAM}."
    state: dict[str, Tensor] = {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
    state = {name: value for name, value in state.items() if not _OTHERS_ADAPTER.search(name)}
    known = team.state_dict()
    trained = {name for name, parameter in team.named_parameters() if parameter.requires_grad}
    missing, unknown = sorted(trained - set(state)), sorted(set(state) - set(known))
    shapes = [name for name, value in state.items() if name in known and known[name].shape != value.shape]
    for what, names in (("does not hold", missing), ("also holds", unknown), ("has another shape of", shapes)):
        if names:
            raise ConfigurationError(
                f"{path} is a checkpoint of another team: it {what} {names[0]!r} ({len(names)} such weights); give the "
                "models, number of agents and `lora` of its run"
            )
    team.load_state_dict(state, strict=False)


def _formatters(saved: Any) -> Any:
    """Formatters with import paths looked up among what is imported: a checkpoint imports no module of others."""
    if isinstance(saved, list):
        return [_formatters(one) for one in saved]
    return imported_already(saved, "formatters") if isinstance(saved, str) and "{" not in saved else saved
