"""Fits in one or several processes, as a script: ``process_runs.py JOBS.json``. The ends of the fits are left in files.

The jobs run one after the other in the same processes, which need not import everything again.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

import exact  # noqa: F401
from pbrl_lightning import (
    AttachedCritics,
    CurrentCopyComparator,
    HistoryComparator,
    JointCritic,
    JointRewardModel,
    MARLHFModule,
    MARLModule,
    ReferenceKL,
    ShardedStrategy,
)
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.sharding import whole
from training_runs import EVAL_ITEMS, Killer, StopError, make_data, make_module, make_team, make_trainer, text_reward

torch.set_num_threads(1)
ITEMS = [{"prompt": letter} for letter in "abcdefg"]  # 7: no number of processes divides it
TIES = ["b", "d", "f"]  # of two processes, the second one's items: none of them gives a pair
GLOBAL_BATCH = 4
STRATEGIES = {
    "auto": lambda: "auto",
    "ddp": lambda: DDPStrategy(process_group_backend="gloo", find_unused_parameters=True),
    "sharded": ShardedStrategy,
}


class FirstGradients(Callback):
    """The gradients of the first optimizer step, as the optimizer sees them."""

    def __init__(self):
        self.found = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.found:
            named = pl_module.named_parameters()
            self.found = {name: whole(p.grad).detach().clone() for name, p in named if p.grad is not None}


class Shares(Callback):
    """Bytes of parameters that this process holds when an update begins, gathered ones included."""

    def __init__(self):
        self.held = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        own = {id(p): p.to_local() if isinstance(p, DTensor) else p for p in pl_module.parameters()}
        states = [child._get_fsdp_state() for child in pl_module.modules() if isinstance(child, FSDPModule)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        whole = [tensor for group in groups for p in group.fsdp_params for tensor in p.all_gather_outputs]
        self.held.append(sum(tensor.untyped_storage().nbytes() for tensor in [*own.values(), *whole]))


class Reward:
    """Ties for some prompts, raises for one on one process; otherwise a number of every agent's text."""

    def __init__(self, ties=(), fails_at=None, fails_on=None, seconds=0.0):
        self.ties, self.fails_at, self.fails_on, self.rank = ties, fails_at, fails_on, 0
        self.seconds = seconds

    def __call__(self, *completions, prompts, batch_items):
        if self.fails_at in prompts[0] and self.rank == self.fails_on:
            raise ValueError("the judge is out")
        time.sleep(self.seconds)
        scores = text_reward(*completions)
        return [1.0 if prompt in self.ties else score for prompt, score in zip(prompts[0], scores, strict=True)]


COMPARATORS = {"history": lambda: HistoryComparator(k=2), "copy": lambda: CurrentCopyComparator(["cpu"])}


def build(
    kind,
    world,
    out,
    dtype="float64",
    lora=False,
    reward=None,
    accumulate=1,
    checkpointing=False,
    halves=False,
    comparator=None,
    held_out=False,
    **_,
):
    """A module and its data; the global batch is the same for every number of processes and batches of a step."""
    precise = {"dtype": dtype}
    team = make_team(dtype=dtype, gradient_checkpointing=checkpointing, **({"lora": True} if lora else {}))
    share = GLOBAL_BATCH // world // accumulate
    data = {
        "items": ITEMS,
        "reward": reward or Reward(),
        "num_candidates": 5,
        "batch_size": share,
        "rollout_batch_size": share,
        "iterative": kind.endswith("iter"),
        "replay_dir": str(out / "replay"),
        "eval_items": EVAL_ITEMS,
    }
    if held_out:  # five pairs: one process has a row that only fills up
        letters = "vwxyz"
        data["eval_pairs"] = [
            PreferencePair([letter, letter], ["a", letter], ["bb", ""], 1.0, 0.0, 0.5) for letter in letters
        ]
    if comparator:
        data["comparator"] = COMPARATORS[comparator]()
    if not data["iterative"]:
        data["pairs_per_sample"] = 3
    if kind == "madpo":
        module = make_module(team, num_train_epochs=4)
    elif kind == "madpo_iter":
        module = make_module(team, rounds=3, num_train_epochs=1)
    elif kind.startswith("marlhf"):
        model = JointRewardModel("team" if lora else "builtin:tiny", **({} if lora else precise))
        rounds = {"num_iterations": 2, "num_train_epochs": 2} if data["iterative"] else {"num_train_epochs": 7}
        module = MARLHFModule(
            team, reward_model=model, num_reward_epochs=1, learning_rate=1e-3, reward_learning_rate=1e-3, **rounds
        )
    else:
        options = {
            "magrpo": {"reference_kl": ReferenceKL(0.05)},
            "maac": {"critic": JointCritic("builtin:tiny", **precise)},
            "iac": {"critic": AttachedCritics()},
        }[kind]
        module = MARLModule(team, rl_algorithm=kind, num_train_epochs=10, learning_rate=1e-3, **options)
        del data["batch_size"]
        if halves:  # two updates of each rollout
            data["train_batch_size"] = share // 2
    return module, make_data(data.pop("reward"), **data)


def run_job(options):
    out, world = Path(options["out"]), options["world"]
    fails = options.get("fails", {})
    reward = Reward(tuple(options.get("ties", ())), fails.get("at"), fails.get("on"), options.get("seconds", 0.0))
    module, data = build(options["run"], **{**options, "out": out, "reward": reward})
    gradients, shares = FirstGradients(), Shares()
    steps = 1 if "stop" in options else 10**6
    every = {"every_n_train_steps": steps, "save_top_k": -1, "auto_insert_metric_name": False}
    saver = ModelCheckpoint(out / "checkpoints", "{step}", **every)
    trainer = make_trainer(
        out,
        [gradients, shares, saver, *([Killer(options["stop"])] if "stop" in options else [])],
        devices=world,
        strategy=STRATEGIES[options.get("strategy", "ddp" if world > 1 else "auto")](),
        max_epochs=-1,
        precision=options.get("precision"),
        accumulate_grad_batches=options.get("accumulate", 1),
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    reward.rank = trainer.global_rank
    try:
        trainer.fit(module, data, ckpt_path=options.get("resume"), weights_only=True)
    except StopError:
        return
    trained = {name: whole(value.detach()).clone() for name, value in module.named_parameters() if value.requires_grad}
    end = {
        "weights": trained,
        "gradients": gradients.found,
        "held": shares.held,
        "steps": trainer.global_step,
        "env_step": data.env_step,
        "held_out": {name: v.item() for name, v in trainer.callback_metrics.items() if name.startswith("val/")},
        "rounds": [(r.collected_pairs, r.train_pairs, r.reward_mean, r.comparator_reward_mean) for r in data.rounds],
        "evaluations": [c.results for c in trainer.callbacks if hasattr(c, "results")],
    }
    torch.save(end, out / f"end_{trainer.global_rank}.pt")


def start(root, jobs, world):
    """Starts the processes of a list of jobs; each leaves its files in a directory of its job's name."""
    for job in jobs:
        Path(job["out"]).mkdir(parents=True)
    (root / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "NODE_RANK": "0"}
    processes = []
    for rank in range(world):
        own = {**place, "LOCAL_RANK": str(rank)} if world > 1 else {}
        log = (root / f"log_{rank}.txt").open("w")
        command = [sys.executable, "-W", "ignore", __file__, str(root / "jobs.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return processes


def run_jobs(root, jobs, world, timeout=600):
    root.mkdir()
    listed = [{**job, "out": str(root / name), "world": world} for name, job in jobs.items()]
    for rank, process in enumerate(start(root, listed, world)):
        assert process.wait(timeout) == 0, (root / f"log_{rank}.txt").read_text()[-6000:]
    return root


def ends(root, name, world):
    return [torch.load(root / name / f"end_{rank}.pt") for rank in range(world)]


def gap(first, second):
    assert first.keys() == second.keys()
    assert first
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(job)
