"""The command line: ``pbrl fit --config …``, ``pbrl validate --config …``, and what needs no training."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

import pbrl_lightning.callbacks
from pbrl_lightning.acceleration.precision import AUTO
from pbrl_lightning.checkpoints import check_whole, dtype_of_checkpoint, newest_checkpoint
from pbrl_lightning.collecting import PreferenceTrainer
from pbrl_lightning.commands import check, compare, completion, expected, help_texts, migrate, sample
from pbrl_lightning.commands.formatting import HelpFormatter
from pbrl_lightning.commands.instantiation import Instantiation
from pbrl_lightning.commands.parsing import CommandParser
from pbrl_lightning.comparators.base import Comparator
from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.modules.base import LearnerModule
from pbrl_lightning.modules.run_dtype import RunDtype
from pbrl_lightning.preferences.replay import ReplayBuffer
from pbrl_lightning.run_directory import continue_from, run_directory
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError
from pbrl_lightning.utils.nearest import hint
from pbrl_lightning.utils.secrets import masked

EPILOG = """\
Start with:                 pbrl fit --config configs/quickstart.yaml
All options of a command:   pbrl fit --help
The options of a class:     pbrl fit --model.help MARLHFModule
                            pbrl fit --data.comparator.help ApiComparator
                            pbrl fit --data.replay.help LambdaDecayReplay
Traceback of an error:      PBRL_TRACEBACK=1 pbrl fit …
"""
_TITLES = {
    "trainer": "Trainer (Lightning's options)",
    "model": "Module: what is trained, and how",
    "data": "Data: task items, reward and preference pairs",
    "ckpt_path": "Checkpoint",
}
"""Titles of the groups of options, by the beginning of their names."""
_DESCRIPTIONS = {
    "fit": "Train a team, a reward model or both.",
    "validate": "Score the agents with the task reward on all evaluation items.",
    "collect": "Collect one round of preference pairs and write its file; nothing is trained.",
}
_REFUSED = ("optimizer", "lr_scheduler")
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")


class ConfigSaver(SaveConfigCallback):
    """Saves a fit's config as ``config.yaml``, others as ``config_validate.yaml`` …; keeps earlier ones, numbered."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            collecting = getattr(trainer, "collecting", False)
            self.config_filename = "config_collect.yaml" if collecting else "config_validate.yaml"
        if isinstance(pl_module, RunDtype):
            pl_module.settle_dtype()
            self.config = _with_dtype(self.config, pl_module.auto_dtype)
        self.config = _without_keys(self.config)
        path = run_directory(trainer) / self.config_filename
        if trainer.is_global_zero and not self.already_saved:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                names = (path.with_stem(f"{path.stem}_{number}") for number in range(1, sys.maxsize))
                path.rename(next(name for name in names if not name.exists()))
            self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=self.multifile)
        self.already_saved = True


def _without_keys(config: Namespace) -> Namespace:
    """The options that may be saved: keys in options of the user's own classes are left out, and named."""
    kept, hidden = config.clone(), []
    for name, value in config.items():
        plain = masked(value, name.rpartition(".")[2])
        if plain != value:
            kept[name] = plain
            hidden.append(f"`{name}`")
    if hidden:
        rank_zero_warn(
            f"{', '.join(hidden)} may hold a key, and is left out of the saved configuration: read it from an "
            "environment variable instead"
        )
    return kept


def _with_dtype(config: Namespace, dtype: str | None) -> Namespace:
    """A config with the type that ``dtype: auto`` meant in the run, so that it can be repeated on any machine."""
    settled = config.clone()
    for key, value in config.items():
        if dtype is not None and value == AUTO and key.endswith(".dtype"):
            settled[key] = dtype
    return settled


class PreferenceCLI(LightningCLI):
    """LightningCLI for a module of this library (by class name) and the preference data module.

    Args:
        args: Replaces ``sys.argv[1:]``.
        run: False builds ``model``, ``datamodule`` and ``trainer`` without a subcommand, and saves no config.
    """

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        _find_users_modules()
        _import_public_classes()
        warnings.filterwarnings("ignore", message=".*args parameter is", module=r"lightning\.")  # it is on purpose
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
                "formatter_class": HelpFormatter,
                "version": help_texts.package_version(),
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
            for name, (make_parser, described) in COMMANDS.items():
                self.parser.commands.add_subcommand(name, make_parser(), help=described)
            self.parser.usage = "pbrl COMMAND [options]"

    @override
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        options = {name: {"description": text} for name, text in _DESCRIPTIONS.items()}
        super()._add_subcommands(parser, **options | kwargs)
        assert isinstance(parser, CommandParser)  # made by `init_parser`
        for action in parser.commands._choices_actions:  # Lightning's own words for its Trainer's methods
            action.help = _DESCRIPTIONS[action.dest]

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = f"pbrl {subcommand} --config FILE [options]"
        for action in parser._actions:
            if action.dest.startswith(_REFUSED):
                action.help = argparse.SUPPRESS
        for group in parser._action_groups:
            first = next((action.dest.partition(".")[0] for action in group._group_actions), "")
            group.title = _TITLES.get(first, group.title)
        return parser

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
        if command is not None:
            _check_checkpoint(self.config[command].get("ckpt_path"))
            _check_optimizer(self.config[command])

    @override
    def instantiate_classes(self) -> None:
        with Instantiation(self.parser):
            super().instantiate_classes()

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        kept = ("fit", "validate")  # no module here tests or predicts
        return {name: LightningCLI.subcommands()[name] for name in kept} | {"collect": {"model", "datamodule"}}

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer, PreferenceTrainer):
            trainer.log_interval_given = self._get(self.config_init, "trainer.log_every_n_steps") is not None
        return trainer

    def before_fit(self) -> None:
        """Takes the newest checkpoint where ``--ckpt_path`` is a run's directory, and resumes in that directory."""
        options = self.config_init["fit"]
        path = options.get("ckpt_path")
        # A sharded checkpoint is a directory too, and says so.
        if path is not None and Path(path).is_dir() and not (Path(path) / ".metadata").exists():
            options["ckpt_path"] = path = str(newest_checkpoint(path))
        if path is not None:
            continue_from(self.trainer, path)
        self._take_dtype(path)

    def before_validate(self) -> None:
        """Takes the precision of the checkpoint."""
        self._take_dtype(self.config_init["validate"].get("ckpt_path"))

    def _take_dtype(self, path: str | None) -> None:
        """Brings ``dtype: auto`` to what a checkpoint says, before anything is loaded or the config is saved."""
        if path is not None and (dtype := dtype_of_checkpoint(path)) is not None:
            self.model.settle_dtype(dtype)


def _check_checkpoint(given: Any) -> None:
    """Finds a missing or broken checkpoint before any class is made."""
    if given is None or str(given).partition(":")[0] in _CHECKPOINT_WORDS or "://" in str(given):
        return
    path = Path(given)
    if not path.exists():
        beside = [str(other) for other in path.parent.glob("*.ckpt")]
        raise MissingFileError(
            f"`--ckpt_path` must be a checkpoint (.ckpt), the directory of a run, or `last`, and {str(given)!r} does "
            f"not exist{hint(difflib.get_close_matches(str(given), beside, 1))}"
        )
    if path.is_file():
        check_whole(path)


def _check_optimizer(config: Any) -> None:
    """Lightning's own options of this kind would replace the optimizer with a group per agent, or do nothing."""
    for name in _REFUSED:
        if config.get(name) is not None:
            raise ConfigurationError(
                f"`--{name}` is not supported: the modules have one AdamW with a group per agent; set "
                "`--model.learning_rate`, `--model.weight_decay` or `--model.lr_scheduler`"
            )


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
    "check": (check.parser, check.HELP),
    "completion": (completion.parser, completion.HELP),
}
"""What runs no Trainer: its options, and its line in the help."""
_RUN: dict[str, Callable[[list[str]], None]] = {
    "sample": sample.main,
    "migrate": migrate.main,
    "compare": compare.main,
    "check": check.main,
}


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    An error that is addressed to the user ends it with one sentence, and exit code 2 for a wrong configuration or 1 for
    what went wrong in a run; ``PBRL_TRACEBACK=1`` shows the traceback.

    Args:
        args: Replaces ``sys.argv[1:]``.
    """
    given = sys.argv[1:] if args is None else args
    with expected.reported():
        help_texts.check_command(given)
        try:
            if given[0] in _RUN:
                _find_users_modules()
                _import_public_classes()
                _RUN[given[0]](given[1:])
            else:
                PreferenceCLI(args)
        except MisconfigurationException as error:
            raise ConfigurationError(" ".join(str(error).split())) from error


def _import_public_classes() -> None:
    """Class names in options are looked up among the classes that are imported."""
    for name in pbrl_lightning.__all__:
        getattr(pbrl_lightning, name)


def _find_users_modules() -> None:
    """A reward function of the user's own is found from the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


if __name__ == "__main__":
    main()
