"""Counted randomness: every draw is a function of (seed, stream, step, item, agent); nothing is carried."""

from __future__ import annotations

import hashlib
import os
from typing import Literal, get_args

import torch

Stream = Literal["actors", "comparator", "rollouts", "evaluation", "replay", "order", "selection", "init"]


def counted_generator(seed: int, stream: Stream, step: int = 0, item: int = 0, agent: int = 0) -> torch.Generator:
    """The CPU generator of one counted draw.

    The same five numbers give the same draws in every process, at any time, whatever was drawn before; so a
    resumed run, another world size or an evaluation in between changes no sample.

    Args:
        seed: The run's seed.
        stream: What the draw is for. Streams are independent of each other.
        step: Round number (1-based) or rollout number.
        item: Index of the task item in its dataset.
        agent: Index of the agent.

    Returns:
        A fresh generator, not shared with anyone.

    Raises:
        ValueError: If ``stream`` is unknown.

    Example:
        >>> a = torch.rand(1, generator=counted_generator(0, "actors", step=1, item=2))
        >>> b = torch.rand(1, generator=counted_generator(0, "actors", step=1, item=2))
        >>> bool(a == b)
        True
    """
    if stream not in get_args(Stream):
        raise ValueError(f"`stream` must be one of {', '.join(get_args(Stream))}, got {stream!r}")
    key = f"{seed}/{stream}/{step}/{item}/{agent}".encode()
    # 63 bits: `manual_seed` refuses what does not fit a signed 64-bit integer.
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1)


def counted_uniforms(
    num_candidates: int,
    num_tokens: int,
    seed: int,
    stream: Stream,
    step: int = 0,
    item: int = 0,
    agent: int = 0,
) -> torch.Tensor:
    """One uniform in [0, 1) per (candidate, token), drawn in advance.

    Row-major, so candidate ``k`` does not depend on how many candidates are drawn.

    Returns:
        Shape ``(num_candidates, num_tokens)``, float64.
    """
    generator = counted_generator(seed, stream, step, item, agent)
    return torch.rand(num_candidates, num_tokens, generator=generator, dtype=torch.float64)


def counted_permutation(length: int, generator: torch.Generator) -> list[int]:
    """A shuffled ``range(length)``."""
    return torch.randperm(length, generator=generator).tolist()


def run_seed(seed: int | None) -> int:
    """The seed of a run.

    Args:
        seed: As given; None takes the seed of ``lightning.seed_everything``, which hands it on in the environment to
            the processes of a run, or 0 where it was not called.
    """
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
