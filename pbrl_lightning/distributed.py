"""The few exchanges between processes; all of them do nothing in a run of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from pbrl_lightning.utils.errors import RunError

T = TypeVar("T")


class StopRequested(KeyboardInterrupt):
    """The run was asked to end, and does."""


class OtherProcessError(RunError):
    """Another process of the run failed, and this one ends with it."""


def together(work: Callable[[], dict[int, T]]) -> list[T]:
    """Does a share of the work on every process, and gives all parts in the order of their indices on each.

    A failure on one process ends all of them: the others do not wait for a part that never comes.

    Args:
        work: Gives this process's parts by index.

    Raises:
        OtherProcessError: If another process failed; the message says which and how.
        StopRequested: If another process was asked to end: then all end in order.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return gather_by_index(work())
    failure: BaseException | None = None
    parts: dict[int, T] = {}
    try:
        parts = work()
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    told: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    stopped = isinstance(failure, StopRequested)
    dist.all_gather_object(told, None if failure is None else (stopped, f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, said in enumerate(told):
        if said is not None:
            raise StopRequested if said[0] else OtherProcessError(f"process {rank} failed: {said[1]}")
    return gather_by_index(parts)


def gather_by_index(parts: dict[int, T]) -> list[T]:
    """The parts of all ranks in the order of their indices, the same on every rank."""
    everyone: list[dict[int, T]] = [parts]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, parts)
    merged = {index: part for rank_parts in everyone for index, part in rank_parts.items()}
    return [merged[index] for index in sorted(merged)]


def this_process() -> tuple[int, int]:
    """Rank of this process and number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_rank_zero(value: T) -> T:
    """Rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
