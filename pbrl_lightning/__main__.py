"""The console script ``pbrl``, and ``python -m pbrl_lightning``: help and version come without importing torch."""

from __future__ import annotations

import sys

from pbrl_lightning.commands import expected, help_texts


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: Replaces ``sys.argv[1:]``.
    """
    given = sys.argv[1:] if args is None else args
    if (text := help_texts.answer(given)) is not None:
        sys.stdout.write(text)
        return
    with expected.reported():
        help_texts.check_command(given)
    from pbrl_lightning.cli import main as run

    run(args)


if __name__ == "__main__":
    main()
