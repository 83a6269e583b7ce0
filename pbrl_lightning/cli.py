"""The command line: ``pbrl fit --config …``, ``pbrl validate --config …``, and what needs no training."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

import pbrl_lightning.callbacks
from pbrl_lightning.checkpoints import newest_checkpoint
from pbrl_lightning.collecting import PreferenceTrainer
from pbrl_lightning.commands import compare, completion, expected, migrate, sample
from pbrl_lightning.comparators.base import Comparator
from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.modules.base import LearnerModule
from pbrl_lightning.preferences.replay import ReplayBuffer
from pbrl_lightning.run_directory import continue_from, run_directory
from pbrl_lightning.utils.errors import ConfigurationError

EPILOG = """\
Start with:                pbrl fit --config configs/quickstart.yaml
All options of a command:  pbrl fit --help
Those of a class:          pbrl fit --model.help MARLHFModule, pbrl fit --data.comparator.help ApiComparator,
                           pbrl fit --data.replay.help LambdaDecayReplay
Tracebacks of errors:      PBRL_TRACEBACK=1
"""


class ConfigSaver(SaveConfigCallback):
    """Saves a fit's config as ``config.yaml``, others as ``config_validate.yaml`` …; keeps earlier ones, numbered."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            collecting = getattr(trainer, "collecting", False)
            self.config_filename = "config_collect.yaml" if collecting else "config_validate.yaml"
        path = run_directory(trainer) / self.config_filename
        if trainer.is_global_zero and not self.already_saved:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                names = (path.with_stem(f"{path.stem}_{number}") for number in range(1, sys.maxsize))
                path.rename(next(name for name in names if not name.exists()))
            self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=self.multifile)
        self.already_saved = True


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Leaves the lines of the epilog as they are."""


class CommandParser(LightningArgumentParser):
    """Lightning's parser, which takes further commands beside those of the Trainer."""

    commands: Any = None
    """Its commands, once there are any."""

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self.commands = super().add_subcommands(*args, **kwargs)
        return self.commands


class PreferenceCLI(LightningCLI):
    """LightningCLI for a module of this library (by class name) and the preference data module.

    Args:
        args: Replaces ``sys.argv[1:]``.
        run: False builds ``model``, ``datamodule`` and ``trainer`` without a subcommand, and saves no config.
    """

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        _find_users_modules()
        # What Lightning says of every run of this kind, and of nothing that a user could change.
        for message in ("Found .* in eval mode", ".*does not have many workers", ".*LeafSpec", ".*args parameter is"):
            warnings.filterwarnings("ignore", message=message)
        super().__init__(
            LearnerModule,
            PreferenceDataModule,
            trainer_class=PreferenceTrainer,
            parser_class=CommandParser,
            subclass_mode_model=True,
            seed_everything_default=False,  # every draw comes from `data.seed`
            save_config_callback=ConfigSaver if run else None,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "prog": "pbrl",
                "description": "Train teams of LLM agents from preferences between their joint responses.",
                "epilog": EPILOG,
                "formatter_class": _HelpFormatter,
            },
            trainer_defaults={"max_epochs": -1},  # the schedule of rounds ends the run
            args=args,
            run=run,
        )

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if add_subcommands:
            assert isinstance(self.parser, CommandParser)  # made by `init_parser`
            for name, (made, described) in COMMANDS.items():
                self.parser.commands.add_subcommand(name, made(), help=described)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        command = self.config.get("subcommand")
        if command == "completion":
            assert isinstance(parser, CommandParser)
            sys.stdout.write(_completion(parser, self.config.completion.shell))
            sys.exit(0)
        if command in COMMANDS:
            raise ConfigurationError(f"`{command}` must be the first word after `pbrl`: its options follow it")

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        kept = ("fit", "validate")  # no module here tests or predicts
        return {name: LightningCLI.subcommands()[name] for name in kept} | {"collect": {"model", "datamodule"}}

    def before_fit(self) -> None:
        """Takes the newest checkpoint where ``--ckpt_path`` is a run's directory, and resumes in that directory."""
        options = self.config_init["fit"]
        path = options.get("ckpt_path")
        # A sharded checkpoint is a directory too, and says so.
        if path is not None and Path(path).is_dir() and not (Path(path) / ".metadata").exists():
            options["ckpt_path"] = path = str(newest_checkpoint(path))
        if path is not None:
            continue_from(self.trainer, path)


def _completion(parser: CommandParser, shell: completion.Shell) -> str:
    """The completion script of the whole command line."""
    options = {name: list(made._option_string_actions) for name, made in parser.commands.choices.items()}
    named = [getattr(pbrl_lightning, name) for name in pbrl_lightning.__all__]
    bases = {"model": LearnerModule, "data.comparator": Comparator, "data.replay": ReplayBuffer}
    values = {
        option: [c.__name__ for c in named if inspect.isclass(c) and issubclass(c, base) and not inspect.isabstract(c)]
        for option, base in bases.items()
    }
    both = {f"--{option}": classes for option, classes in values.items()}
    return completion.script(shell, options, both | {f"{name}.help": classes for name, classes in both.items()})


COMMANDS: dict[str, tuple[Callable[[], ArgumentParser], str]] = {
    "sample": (sample.parser, sample.HELP),
    "migrate": (migrate.parser, migrate.HELP),
    "compare": (compare.parser, compare.HELP),
    "completion": (completion.parser, completion.HELP),
}
"""What runs no Trainer: its options, and its line in the help."""
_RUN: dict[str, Callable[[list[str]], None]] = {
    "sample": sample.main,
    "migrate": migrate.main,
    "compare": compare.main,
}


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    What a check of this library refuses ends it with one sentence; ``PBRL_TRACEBACK=1`` shows the traceback too.

    Args:
        args: Replaces ``sys.argv[1:]``.
    """
    given = sys.argv[1:] if args is None else args
    try:
        if given and given[0] in _RUN:
            _find_users_modules()
            _RUN[given[0]](given[1:])
        else:
            PreferenceCLI(args)
    except Exception as error:
        # The parser shows the values that it was given, and these hold a key.
        refused = re.search(r"`[^`]*`[^`\n]* (must not hold a key|not a key).*", str(error))
        said = f"error: {refused[0]}" if refused and isinstance(error, ValueError) else expected.sentence(error)
        if said is None:
            raise
    else:
        return
    sys.exit(said)


def _find_users_modules() -> None:
    """A reward function of the user's own is found from the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


if __name__ == "__main__":
    main()
