"""``pbrl sample``: a team's answers to task items, as JSONL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.commands.parsing import ClearErrors
from pbrl_lightning.data_items import load_items
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.generation import joint_responses
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, raise_together
from pbrl_lightning.writable import check_output

HELP = "Write a team's responses to task items as JSON lines."


def parser(defaults: dict[str, Any] | None = None) -> ArgumentParser:
    """The command's options.

    Args:
        defaults: Values in the place of the options' own defaults.
    """
    made = ClearErrors(
        prog="pbrl sample",
        usage="pbrl sample (--run DIRECTORY | --team.models MODELS --items ITEMS) [options]",
        description=f"{HELP} A line is one joint response: item_index, candidate, item, prompts, completions …",
        epilog="pbrl sample --run runs/madpo/lightning_logs/version_0 --items my_items.jsonl --output answers.jsonl",
    )
    made.add_argument("--config", action="config", help="Options of this command from a file.")
    made.add_argument(
        "--run",
        type=str | None,
        help="A run's directory: its exported agents answer, with the formatters, evaluation items, sampling and seed "
        "of its config.yaml.",
    )
    made.add_class_arguments(AgentTeam, "team", skip={"tokenizers", "frozen", "gradient_checkpointing"})
    made.add_argument("--items", type=str | None, help="A JSON or JSONL file, or the import path of a callable.")
    made.add_argument("--output", type=str | None, help="The file; standard output without it.")
    made.add_argument("--overwrite", type=bool, default=False, help="Replace the file where it exists.")
    made.add_argument("--num_candidates", type=int, default=1, help="Joint responses per item.")
    made.add_argument("--sampling", type=SamplingConfig, default=SamplingConfig(), help="How responses are sampled.")
    made.add_argument("--seed", type=int, default=0, help="Every draw is a function of it.")
    made.add_argument("--device", type=str | None, help="Where the agents go; default: a GPU if there is one.")
    if defaults:
        made.set_defaults(defaults)
    return made


def main(args: list[str]) -> None:
    """Runs the command.

    Args:
        args: What follows ``pbrl sample``.

    Raises:
        ConfigurationError: If an option is wrong; all problems are named at once.
        MissingFileError: If a file that is named does not exist.
    """
    named = Namespace(run=None)
    found = ClearErrors(add_help=False, exit_on_error=False)
    found.add_argument("--run", type=str | None)
    given = [index for index, argument in enumerate(args) if argument.partition("=")[0] == "--run"]
    if given:
        place = args[given[-1] : given[-1] + (1 if "=" in args[given[-1]] else 2)]
        named = found.parse_args(place)
    made = parser(of_run(Path(named.run)) if named.run is not None else None)
    options = made.instantiate(made.parse_args(args))
    problems = []
    if options["items"] is None:
        problems.append("`items` must be given (a file or the import path of a callable)")
    if options.num_candidates < 1:
        problems.append(f"`num_candidates` must be >= 1, got {options.num_candidates}")
    if options.output is not None and Path(options.output).exists() and not options.overwrite:
        problems.append(f"`output` must not exist already (or `--overwrite true`), got {options.output}")
    raise_together(problems)
    if options.output is not None:
        check_output(options.output)
    items = load_items(options["items"], "items")
    team = options.team
    team.place([options.device or ("cuda" if torch.cuda.is_available() else "cpu")])
    how = {"num_candidates": options.num_candidates, "sampling": options.sampling, "seed": options.seed}
    lines = (line for line in answers(team, items, **how))
    if options.output is None:
        sys.stdout.writelines(lines)
        return
    target = Path(options.output)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda file: _write(file, lines))
    sys.stderr.write(f"{len(items) * options.num_candidates} joint responses: {target}\n")


def answers(
    team: AgentTeam, items: list[TaskItem], *, num_candidates: int, sampling: SamplingConfig, seed: int
) -> Iterator[str]:
    """A team's joint responses as lines of JSON, with the draws that an evaluation makes.

    Args:
        team: The agents.
        items: Task items.
        num_candidates: Joint responses per item.
        sampling: How they are sampled.
        seed: Every draw is a function of it.

    Yields:
        A line of JSON per joint response; a centralized team's text is split by role and also given whole.

    Raises:
        ConfigurationError: If a task item is not JSON; names its index.
    """
    options = {"num_responses": num_candidates, "sampling": sampling, "seed": seed}
    for response in joint_responses(team, items, range(len(items)), **options):  # type: ignore[arg-type]
        record: dict[str, Any] = {
            "item_index": response.item_index,
            "candidate": response.candidate,
            "item": items[response.item_index],
            "prompts": response.prompts,
            "completions": response.completions,
        }
        if response.joint_completion is not None:
            record["joint_completion"] = response.joint_completion
        yield _line(record | {"finished": response.finished})


def of_run(path: Path) -> dict[str, Any]:
    """The options that a run's ``config.yaml`` and its exported agents give.

    Args:
        path: The run's directory.

    Raises:
        MissingFileError: If it holds no config or no exported agents.
        ConfigurationError: If its module has no team.
    """
    config, export = path / "config.yaml", path / "export"
    missing = [str(needed) for needed in (config, export / "agent_0") if not needed.exists()]
    if missing:
        raise MissingFileError(
            f"`run` must be the directory of a run that ended, but {' and '.join(missing)} is missing"
        )
    saved = yaml.safe_load(config.read_text(encoding="utf-8"))
    team = saved["model"].get("init_args", {}).get("team")
    if team is None:
        raise ConfigurationError(f"the run in {path} is a {saved['model']['class_path']}'s, which has no team")
    kept = ("num_agents", "formatters", "dtype", "max_prompt_length", "collaboration", "joint_adapter")
    options = {f"team.{name}": value for name, value in team["init_args"].items() if name in kept}
    data = saved["data"]
    options |= {"team.models": str(export), "seed": data["seed"], "items": data["eval_items"] or data["items"]}
    return options | ({"sampling": data["sampling"]} if data["sampling"] is not None else {})


def _line(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"task item {record['item_index']} cannot be written as JSON: {error}") from error


def _write(file: IO[bytes], lines: Iterator[str]) -> None:
    for line in lines:
        file.write(line.encode())
