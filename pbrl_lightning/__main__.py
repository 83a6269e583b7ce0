"""``python -m pbrl_lightning`` is ``pbrl``."""

from pbrl_lightning.cli import main

if __name__ == "__main__":
    main()
