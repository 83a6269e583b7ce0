"""The few exchanges between processes; all of them do nothing in a run of one process."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_by_index(parts: dict[int, T]) -> list[T]:
    """The parts of all ranks in the order of their indices, the same on every rank."""
    everyone: list[dict[int, T]] = [parts]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, parts)
    merged = {index: part for rank_parts in everyone for index, part in rank_parts.items()}
    return [merged[index] for index in sorted(merged)]


def from_rank_zero(value: T) -> T:
    """Rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
