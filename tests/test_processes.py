"""Two processes (gloo, on the CPU) are one process with the same global batch; a failure of one ends both."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from training_runs import round_files

SCRIPT = Path(__file__).parent / "process_runs.py"
RUNS = ["madpo", "madpo_iter", "marlhf", "marlhf_iter", "magrpo", "maac", "iac"]
SLOW = pytest.mark.slow


def fit(root, run, world, timeout=240, check=True, **options):
    """Runs a fit to its end; gives every process's report, or the finished process of one that need not succeed."""
    out = root / f"{run}_{world}_{len(list(root.iterdir()))}"
    out.mkdir()
    (out / "options.json").write_text(json.dumps({"out": str(out), "world": world, **options}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), run, str(out / "options.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if not check:
        return done, out
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    if "stop" in options:
        return out
    return [torch.load(out / f"end_{rank}.pt") for rank in range(world)], round_files(out / "replay")


def gap(first, second):
    assert first.keys() == second.keys()
    assert first
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


def assert_same_run(one, two, tolerance):
    (alone,), files = one
    ends, other_files = two
    assert files == other_files
    for end in ends:
        for name in ("steps", "env_step", "rounds", "evaluations"):
            assert end[name] == alone[name], name
        assert gap(end["weights"], alone["weights"]) < tolerance
    assert gap(ends[0]["weights"], ends[1]["weights"]) == 0  # B74: the same on both


@pytest.mark.parametrize("run", ["madpo_iter", *(pytest.param(run, marks=SLOW) for run in RUNS if run != "madpo_iter")])
def test_fault_B74_B77_two_processes_are_one(tmp_path, run):
    one = fit(tmp_path, run, 1)
    assert one[0][0]["steps"] >= 20
    assert_same_run(one, fit(tmp_path, run, 2), 1e-9)


@SLOW
@pytest.mark.parametrize("run", ["madpo_iter", "marlhf_iter"])
def test_first_gradients_of_two_processes_in_float32(tmp_path, run):
    (alone,), _ = fit(tmp_path, run, 1, dtype="float32")
    for end in fit(tmp_path, run, 2, dtype="float32")[0]:
        assert gap(end["gradients"], alone["gradients"]) < 1e-6


@SLOW
def test_fault_B64_adapters_on_one_backbone_with_checkpointing(tmp_path):
    one = fit(tmp_path, "madpo_iter", 1, lora=True, checkpointing=True)
    # Adapters are float32, and Adam makes much of the last bit of a small gradient.
    assert_same_run(one, fit(tmp_path, "madpo_iter", 2, lora=True, checkpointing=True), 1e-5)


@SLOW
@pytest.mark.parametrize("run", ["madpo_iter", "marlhf_iter"])
def test_an_item_without_pairs_on_one_process(tmp_path, run):
    ties = ["b", "d", "f"]  # the second process's items: none of them gives a pair
    one = fit(tmp_path, run, 1, ties=ties)
    prompts = {record["prompts"][0] for file in one[1].values() for record in file["pairs"]}
    assert prompts
    assert not prompts & set(ties)
    assert_same_run(one, fit(tmp_path, run, 2, ties=ties), 1e-9)


@SLOW
def test_accumulation_in_two_processes(tmp_path):
    assert_same_run(fit(tmp_path, "madpo", 1), fit(tmp_path, "madpo", 2, accumulate=2), 1e-9)


@SLOW
@pytest.mark.parametrize("run", ["madpo_iter", "magrpo"])
def test_fault_B76_a_failure_on_one_process_ends_both_and_says_why(tmp_path, run):
    started = time.monotonic()
    done, _ = fit(tmp_path, run, 2, check=False, fails={"at": "d", "on": 1})
    assert done.returncode != 0
    assert time.monotonic() - started < 120
    assert "`Reward` raised ValueError for task item 3" in done.stderr
    assert "the judge is out" in done.stderr
    assert "OtherProcessError: process 1 failed: OracleError" in done.stderr


@SLOW
@pytest.mark.parametrize("run", ["madpo_iter", "marlhf_iter"])
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, run, first, then):
    whole = fit(tmp_path, run, 1)
    step = 8  # within the second round
    stopped = fit(tmp_path, run, first, stop=step)
    checkpoint = stopped / "checkpoints" / f"{step}.ckpt"
    ends, _ = fit(tmp_path, run, then, resume=str(checkpoint))
    assert ends[0]["steps"] == whole[0][0]["steps"]
    assert ends[0]["rounds"] == whole[0][0]["rounds"]
    assert gap(ends[0]["weights"], whole[0][0]["weights"]) < 1e-9
    assert round_files(stopped / "replay") == whole[1]
