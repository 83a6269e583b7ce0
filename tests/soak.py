"""Long trials of a run that cannot lose its work; `make soak` runs them, the slow tests run a few of each.

python tests/soak.py kills --count 50     # SIGKILL at random times, resume from the newest checkpoint
python tests/soak.py rounds --count 200   # memory, open files, checkpoint size and time over many rounds
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pbrl_lightning import (
    AllHistoryReplay,
    HistoryComparator,
    JointRewardModel,
    LambdaDecayReplay,
    MADPOModule,
    MARLHFModule,
    ReferenceKL,
)
from pbrl_lightning.checkpoints import newest_checkpoint
from pbrl_lightning.rounds import RoundCallback
from training_runs import make_data, make_team, make_trainer, text_reward

RUNS = ("madpo_iter", "marlhf_iter")


def slow_reward(*completions):
    """Slow enough that kills fall into collections too."""
    time.sleep(0.02)
    return text_reward(*completions)


def start(run: str, root: Path, checkpoint: Path | None, seed: int = 0) -> None:
    """One fit from the beginning or a checkpoint; reports its end in ``end.json``."""
    team = make_team(lora=run == "marlhf_iter")
    if run == "madpo_iter":
        module = MADPOModule(team, num_iterations=4, num_train_epochs=2, learning_rate=1e-3)
    else:
        module = MARLHFModule(
            team,
            reward_model=JointRewardModel("builtin:tiny"),
            num_iterations=3,
            num_reward_epochs=1,
            num_train_epochs=1,
            learning_rate=1e-3,
            reference_kl=ReferenceKL(0.05),
        )
    data = make_data(
        slow_reward, comparator=HistoryComparator(2), replay=LambdaDecayReplay(0.5, sample_size=8), seed=seed
    )
    saver = ModelCheckpoint(filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")
    trainer = make_trainer(
        root, [saver], max_epochs=-1, enable_checkpointing=True, logger=CSVLogger(root, flush_logs_every_n_steps=10**6)
    )
    trainer.fit(module, data, ckpt_path=None if checkpoint is None else str(checkpoint))
    digest = hashlib.sha256()
    for name, value in sorted(module.named_parameters()):
        digest.update(name.encode() + value.detach().numpy().tobytes())
    for group in trainer.optimizers[0].state_dict()["state"].values():
        for value in group.values():
            digest.update(torch.as_tensor(value).numpy().tobytes())
    replay = data.pair_source.open(trainer).directory
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(replay.glob("iter*.json"))}
    (root / "end.json").write_text(json.dumps({"weights": digest.hexdigest(), "files": files}))


def in_a_child(run: str, root: Path, checkpoint: Path | None, kill_after: float | None = None, seed: int = 0) -> float:
    """Runs a fit in a forked process, which need not import everything again; kills it if told to. Seconds it took."""
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(root / "log.txt", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                start(run, root, checkpoint, seed)
                status = 0
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if kill_after is None and status != 0:
        raise RuntimeError((root / "log.txt").read_text()[-3000:])
    return time.monotonic() - begun


def newest_or_none(root: Path) -> Path | None:
    try:
        return newest_checkpoint(root)
    except FileNotFoundError:
        return None


def kills(count: int, seed: int) -> dict:
    """Kills ``count`` runs once or twice each, and compares their ends with one that nobody stopped."""
    draw = random.Random(seed)
    found: dict = {"kills": 0, "runs": 0, "different": [], "killed before the first checkpoint": 0}
    with tempfile.TemporaryDirectory() as scratch:
        whole, seconds = {}, {}
        for run in RUNS:
            for twice in range(2):
                root = Path(scratch) / f"whole_{run}_{twice}"
                root.mkdir()
                seconds[run] = in_a_child(run, root, None)
                end = json.loads((root / "end.json").read_text())
                if twice and end != whole[run]:
                    found["different"].append(f"{run}: the same seed twice")
                whole[run] = end
        for number in range(count):
            run = RUNS[number % len(RUNS)]
            root = Path(scratch) / f"{run}_{number}"
            root.mkdir()
            moments = [draw.uniform(0.05, seconds[run]) for _ in range(draw.choice([1, 1, 2]))]
            for moment in moments:
                in_a_child(run, root, newest_or_none(root), moment)
                found["kills"] += 1
                found["killed before the first checkpoint"] += newest_or_none(root) is None
            if not (root / "end.json").exists():
                in_a_child(run, root, newest_or_none(root))
            found["runs"] += 1
            if json.loads((root / "end.json").read_text()) != whole[run]:
                found["different"].append(f"{run} killed after {moments} s (seed {seed}, number {number})")
    return found


def settle_interned_names() -> None:
    """Brings Python's table of interned strings to its lasting size.

    A slot of that table is not used again when its string dies, and pathlib interns the parts of every path. So paths
    that are made and dropped use the table up; it is then made anew, the first time at twice the size (3.7 MB more with
    153,000 strings), later at the same size. This uses it up before anything is measured.
    """
    if sys.version_info[:2] != (3, 12):  # there interned strings never die
        for number in range(2**19):
            sys.intern(f"soak {number}")


class Gauge(RoundCallback):
    """What a run uses when each round starts."""

    def __init__(self, warm_up: int, leak: float):
        self.rows, self.warm_up, self.leak, self.lost = [], warm_up, leak, []

    def on_round_start(self, trainer, pl_module, round_number):
        self.lost.append(b"x" * int(self.leak / 100 * 2**20))
        if round_number == self.warm_up:
            settle_interned_names()
        # What is free must count as free: loading models in threads leaves holes in the C library's arenas.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        checkpoints = [path for c in trainer.checkpoint_callbacks for path in Path(c.dirpath).glob("*.ckpt")]
        self.rows.append(
            {
                "round": round_number,
                "megabytes": pages * resource.getpagesize() / 2**20,
                "files": len(os.listdir("/proc/self/fd")),
                "checkpoint": max((path.stat().st_size for path in checkpoints), default=0),
                "time": time.monotonic(),
            }
        )


def rounds(count: int, leak: float = 0.0, warm_up: int = 20) -> dict:
    """Runs many rounds of the tiny team; slopes after a warm-up. ``leak`` MB per 100 rounds are lost on purpose."""
    gauge = Gauge(warm_up, leak)
    with tempfile.TemporaryDirectory() as scratch:
        module = MADPOModule(make_team(), num_iterations=count, learning_rate=1e-4)
        data = make_data(text_reward, comparator=HistoryComparator(2), replay=AllHistoryReplay(sample_size=8))
        trainer = make_trainer(
            scratch, [gauge, ModelCheckpoint(save_top_k=1)], max_epochs=-1, enable_checkpointing=True, logger=False
        )
        trainer.fit(module, data)
    kept = [row for row in gauge.rows if row["round"] > warm_up]
    memory = [row["megabytes"] for row in kept]
    steps = [after - before for before, after in itertools.pairwise(memory)]  # a fall can hide a slope
    times = [after["time"] - before["time"] for before, after in itertools.pairwise(kept)]
    third = max(1, len(times) // 3)
    return {
        "rounds": count,
        "megabytes per 100 rounds": 100 * slope([row["round"] for row in kept], memory),
        "megabytes from round to round, lowest and highest": [min(steps), max(steps)],
        "open files": sorted({row["files"] for row in kept}),
        "checkpoint bytes, first and last": [kept[0]["checkpoint"], kept[-1]["checkpoint"]],
        "seconds a round, first and last third": [median(times[:third]), median(times[-third:])],
    }


def slope(xs: list[float], ys: list[float]) -> float:
    """Least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=["kills", "rounds"])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", type=float, default=0.0, help="MB per 100 rounds, to see that `rounds` finds it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = kills(options.count, options.seed) if options.trial == "kills" else rounds(options.count, options.leak)
    print(json.dumps(result, indent=2))
    sys.exit(bool(result.get("different") or result.get("megabytes per 100 rounds", 0) > 1))


if __name__ == "__main__":
    main()
