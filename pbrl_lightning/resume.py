"""Where a checkpoint says that its run stood, in the form that Lightning goes on from without mistakes."""

from __future__ import annotations

from typing import Any


def settle_epoch(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint's epoch either over or open; tried with Lightning 2.6.

    Lightning takes three kinds of checkpoint wrong. One that was written after the last batch of an epoch counts the
    epoch as open, and compares its batches with the length of the next epoch's loader, which here is another round's.
    One that was written after ``max_steps`` or a stop cut an epoch short counts the epoch as over, and would leave its
    other batches out. One that was written while a batch was being processed (``OnExceptionCheckpoint``) would skip
    that batch.

    Args:
        checkpoint: What was loaded; changed in place.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:
        return
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    if not batches["current"]["ready"]:
        return  # before the first batch of an epoch
    if batches["current"]["ready"] > batches["current"]["processed"]:
        _repeat_batch(loops)
    if not batches["is_last_batch"]:
        for count in (epochs["total"], epochs["current"]):
            count["processed"] = count["completed"] = count["started"] - 1
        return
    for count in (epochs["total"], epochs["current"]):
        count["processed"] = count["completed"] = count["started"]
    if batches["total"]["completed"] < batches["total"]["processed"]:  # written in `on_train_batch_end`
        batches["total"]["completed"] = batches["total"]["processed"]
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    loops["state_dict"].pop("combined_loader", None)


def _repeat_batch(loops: dict[str, Any]) -> None:
    """Moves a checkpoint that was written while a batch was being processed back to before that batch."""
    batches = loops["epoch_loop.batch_progress"]
    for count in (batches["total"], batches["current"]):
        count["ready"] = count["started"] = count["processed"] = count["completed"]
    batches["is_last_batch"] = False
    for loader in loops["state_dict"].get("combined_loader", []):
        loader.update(position=loader["position"] - 1, repeat=True)
