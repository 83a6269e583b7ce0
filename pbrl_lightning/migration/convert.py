"""Converts a CoMLRL configuration to ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pbrl_lightning.migration.parts import ConfigParts
from pbrl_lightning.migration.reading import Left, read_configuration
from pbrl_lightning.migration.rules import broken_rules
from pbrl_lightning.utils.errors import ConfigurationError

_IN_CODE = {
    "data.items": "task items: a JSON or JSONL file, or the import path of a callable; in CoMLRL `train_dataset`",
    "data.reward_func": "the import path of the reward, such as my_rewards:score; it is called as in CoMLRL, with one "
    "list of responses per agent",
    "data.eval_items": "held-out task items; the run is not evaluated without them",
    "model.team.formatters": "a template such as 'Summarize: {prompt}' or an import path, one for all agents or one "
    "each; the default is an item's `prompt`",
}
REQUIRED: Final = ("data.items", "data.reward_func")
"""What a run cannot do without among the options that CoMLRL defines in code."""


class MigrationError(ConfigurationError):
    """The configuration is one that CoMLRL refuses, or needs something that does not exist here.

    Attributes:
        problems: A message each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass
class Migration:
    """A converted configuration.

    Attributes:
        run: The section that was converted.
        config: What `pbrl fit --config` takes.
        left: Options without a counterpart.
        to_do: Options that CoMLRL defines in code and that must be supplied here, with a description.
        remarks: Options whose value or default differs here, a sentence each.
    """

    run: str
    config: dict[str, Any]
    left: list[Left] = field(default_factory=list)
    to_do: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def migrate(
    document: Any,
    *,
    items: str | None = None,
    eval_items: str | None = None,
    reward_func: str | None = None,
    formatters: str | list[str] | None = None,
) -> Migration:
    """Converts a CoMLRL configuration.

    Args:
        document: The parsed YAML: sections by name.
        items: Task items; override the data set that the document names.
        eval_items: Held-out task items; likewise.
        reward_func: Import path of the reward, which CoMLRL defines in code.
        formatters: Templates or import paths of the agents' prompts, which CoMLRL defines in code.

    Returns:
        The configuration, with what could not be converted.

    Raises:
        MigrationError: If values are wrong or options do not fit together; all problems are named at once.

    Example:
        >>> migrate({"agent_model": {"name": "gpt2"}, "madpo": {"top_p": 0.9}}).config["data"]
        {'sampling': {'top_p': 0.9}}
    """
    reading = read_configuration(document)
    problems = list(reading.problems)
    if reading.run:
        problems += broken_rules(reading)
    if problems:
        raise MigrationError(list(dict.fromkeys(problems)))
    given = {"items": items, "eval_items": eval_items, "reward_func": reward_func}
    parts = ConfigParts(reading, {name: value for name, value in given.items() if value is not None})
    if formatters is not None:
        parts.config["team"]["formatters"] = formatters
    config = parts.assemble()
    present = {*(f"data.{name}" for name in config["data"])}
    present |= {f"model.team.{name}" for name in parts.config["team"]}
    to_do = {place: what for place, what in _IN_CODE.items() if place not in present}
    return Migration(reading.run, config, parts.left, to_do, parts.remarks)
