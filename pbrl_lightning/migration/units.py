"""Counts that CoMLRL keeps in one unit and this library in another: pure functions of numbers."""

from __future__ import annotations


def rollout_items(responses: int, generations: int) -> int:
    """Task items of a rollout that CoMLRL's actor-critics measure in responses.

    Their buffer is emptied after the item with which it is full, so a part of an item counts as a whole one.

    Args:
        responses: `rollout_buffer_size`, in responses of one agent.
        generations: Responses per agent and item.

    Example:
        >>> rollout_items(8, 4), rollout_items(6, 4), rollout_items(2, 4)
        (2, 2, 1)
    """
    return -(-responses // generations)


def update_items(responses: int, generations: int) -> int:
    """Task items of an update that CoMLRL's actor-critics measure in responses, to the nearest and at least one.

    Args:
        responses: `train_batch_size`, in responses of one agent.
        generations: Responses per agent and item.

    Example:
        >>> update_items(8, 4), update_items(6, 4), update_items(2, 4)
        (2, 2, 1)
    """
    return max(1, int(responses / generations + 0.5))


def updates_of_items(items: int, rollout: int, update: int) -> int:
    """Updates in which a number of task items is trained on, to the nearest and at least one; 0 for no items.

    Args:
        items: How many task items.
        rollout: Task items per rollout.
        update: Task items per update.

    Example:
        >>> updates_of_items(16, 2, 2), updates_of_items(16, 4, 1), updates_of_items(1, 4, 4)
        (8, 16, 1)
    """
    return items and max(1, int(items * -(-rollout // update) / rollout + 0.5))


def updates_of_steps(steps: int, steps_per_update: int) -> int:
    """Updates after which the environment has gone that many steps further, at least one.

    Example:
        >>> updates_of_steps(50, 4), updates_of_steps(7, 8)
        (13, 1)
    """
    return -(-steps // steps_per_update)
