"""The commands of ``pbrl`` that run no Trainer."""
