"""The command line: ``pbrl fit --config …``, ``pbrl validate --config …``."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.cli import LightningCLI

import pbrl_lightning  # noqa: F401  (short class names work for what is imported)
from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.modules.base import TeamModule


def main(args: list[str] | None = None) -> LightningCLI:
    """Runs the command line; ``args`` replaces ``sys.argv[1:]``."""
    # A reward function of the user's own is found from the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return LightningCLI(
        TeamModule,
        PreferenceDataModule,
        subclass_mode_model=True,
        seed_everything_default=False,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"description": "Train teams of LLM agents from preferences between their joint responses."},
        args=args,
    )


if __name__ == "__main__":
    main()
