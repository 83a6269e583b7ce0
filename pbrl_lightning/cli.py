"""The command line: ``pbrl fit --config …``, ``pbrl validate --config …``."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from typing_extensions import override

import pbrl_lightning.callbacks  # noqa: F401  (short class names work for what is imported)
from pbrl_lightning.checkpoints import newest_checkpoint
from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.modules.base import LearnerModule


class ConfigSaver(SaveConfigCallback):
    """Saves a fit's config as ``config.yaml``, else ``config_validate.yaml``; keeps those of earlier runs, numbered."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            self.config_filename = "config_validate.yaml"
        path = Path(trainer.log_dir or trainer.default_root_dir) / self.config_filename
        if trainer.is_global_zero and not self.already_saved and path.exists():
            names = (path.with_stem(f"{path.stem}_{number}") for number in range(1, sys.maxsize))
            path.rename(next(name for name in names if not name.exists()))
        super().setup(trainer, pl_module, stage)


class PreferenceCLI(LightningCLI):
    """LightningCLI for a module of this library (by class name) and the preference data module.

    Args:
        args: Replaces ``sys.argv[1:]``.
        run: False builds ``model``, ``datamodule`` and ``trainer`` without a subcommand, and saves no config.
    """

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        # A reward function of the user's own is found from the working directory.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        # What Lightning says of every run of this kind, and of nothing that a user could change.
        for message in ("Found .* in eval mode", ".*does not have many workers", ".*LeafSpec", ".*args parameter is"):
            warnings.filterwarnings("ignore", message=message)
        super().__init__(
            LearnerModule,
            PreferenceDataModule,
            subclass_mode_model=True,
            seed_everything_default=False,  # every draw comes from `data.seed`
            save_config_callback=ConfigSaver if run else None,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "prog": "pbrl",
                "description": "Train teams of LLM agents from preferences between their joint responses.",
                "epilog": "Start with: pbrl fit --config configs/quickstart.yaml",
            },
            trainer_defaults={"max_epochs": -1},  # the schedule of rounds ends the run
            args=args,
            run=run,
        )

    def before_fit(self) -> None:
        """Takes the newest whole checkpoint where ``--ckpt_path`` is a directory of a run."""
        options = self.config_init["fit"]
        path = options.get("ckpt_path")
        # A sharded checkpoint is a directory too, and says so.
        if path is not None and Path(path).is_dir() and not (Path(path) / ".metadata").exists():
            options["ckpt_path"] = str(newest_checkpoint(path))


def main(args: list[str] | None = None) -> None:
    """Runs the command line; ``args`` replaces ``sys.argv[1:]``."""
    try:
        PreferenceCLI(args)
    except ValueError as error:
        # The parser shows the values that it was given, and these hold a key.
        said = re.search(r"`[^`]*`[^`\n]* (must not hold a key|not a key).*", str(error))
        if said is None:
            raise
        refused = said[0]
    else:
        return
    sys.exit(f"error: {refused}")


if __name__ == "__main__":
    main()
