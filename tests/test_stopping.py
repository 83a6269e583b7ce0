"""Runs that are told to stop, or killed: SIGTERM, Ctrl-C, SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import soak
from training_runs import round_files

ROOT = Path(__file__).parent.parent
CONFIG = str(ROOT / "configs/debug/madpo_iter.yaml")
REWARD = """
import os
import time
from pathlib import Path

from pbrl_lightning.tasks.coordination import same_last_letter


def score(*completions):
    Path("calls").open("a").write("x")
    time.sleep(float(os.environ["SECONDS"]))
    return same_last_letter(*completions)
"""


def start(directory, *options, seconds=0.0):
    """A run whose reward takes so long; its code stays the same, or its scores would not be taken over."""
    (directory / "paid.py").write_text(REWARD)
    command = [sys.executable, "-m", "pbrl_lightning", "fit", "--config", CONFIG, "--data.reward_func=paid.score"]
    with (directory / "log.txt").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SECONDS": str(seconds)}
        return subprocess.Popen([*command, *options], cwd=directory, stdout=log, stderr=log, env=environment)


def calls(directory):
    path = directory / "calls"
    return path.stat().st_size if path.exists() else 0


def wait_for(condition, process):
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(process, number):
    """Sends the signal; the run must end within 10 seconds, and not as if all were well."""
    begun = time.monotonic()
    process.send_signal(number)
    assert process.wait(10) != 0
    assert time.monotonic() - begun < 10


def final_weights(directory):
    exports = sorted(directory.rglob("export"), key=lambda path: path.stat().st_mtime)
    return {path.parent.name: path.read_bytes() for path in sorted(exports[-1].rglob("*.safetensors"))}


SHORT = ["--model.init_args.num_iterations=3", "--data.eval_items=null"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    assert start(directory, *SHORT).wait(120) == 0, (directory / "log.txt").read_text()
    return final_weights(directory), round_files(next(directory.rglob("replay"))), calls(directory)


def go_on(directory):
    found = list(directory.rglob("version_*"))
    process = start(directory, *SHORT, f"--ckpt_path={max(found, key=lambda path: int(path.name[8:]))}")
    assert process.wait(120) == 0, (directory / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_fault_B86_stopped_in_a_collection_nothing_is_paid_for_twice(tmp_path, whole, number):
    weights, files, paid = whole
    process = start(tmp_path, *SHORT, seconds=0.1)
    in_second_round = paid // 3 + 5
    wait_for(lambda: calls(tmp_path) >= in_second_round, process)
    stop(process, number)
    (checkpoint,) = tmp_path.rglob("stopped.ckpt")
    assert torch.load(checkpoint, weights_only=True)
    before = calls(tmp_path)
    go_on(tmp_path)
    assert final_weights(tmp_path) == weights
    assert round_files(next(tmp_path.rglob("replay"))) == files
    # The call in progress is made again; no other.
    assert before >= in_second_round
    assert paid <= calls(tmp_path) <= paid + 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_fault_B86_stopped_in_training_the_step_is_finished(tmp_path, whole, number):
    weights, files, paid = whole
    process = start(tmp_path, *SHORT)
    wait_for(lambda: calls(tmp_path) >= paid // 3, process)
    # Not `rglob`: it would walk the journal's folder while the run removes it.
    wait_for(lambda: list(tmp_path.glob("runs/debug/lightning_logs/*/checkpoints/round_0001.ckpt")), process)
    stop(process, number)
    (checkpoint,) = tmp_path.rglob("stopped.ckpt")
    assert "asked to stop; the run goes on with --ckpt_path" in (tmp_path / "log.txt").read_text()
    assert torch.load(checkpoint, weights_only=True)["global_step"] >= 1
    go_on(tmp_path)
    assert final_weights(tmp_path) == weights
    assert round_files(next(tmp_path.rglob("replay"))) == files
    assert calls(tmp_path) <= paid + 1


@pytest.mark.slow
def test_stopped_before_its_first_checkpoint_the_same_command_goes_on(tmp_path):
    process = start(tmp_path, "--model.init_args.num_iterations=1", "--data.eval_items=null", seconds=0.05)
    wait_for(lambda: calls(tmp_path) >= 10, process)
    process.kill()
    process.wait()
    process = start(tmp_path, "--model.init_args.num_iterations=1", "--data.eval_items=null")
    assert process.wait(120) == 0, (tmp_path / "log.txt").read_text()
    assert "goes on from the journal of an earlier start" in (tmp_path / "log.txt").read_text()
    assert calls(tmp_path) <= 2 * 16 + 1  # 16 items, two sides
    assert not (tmp_path / "runs/debug/journal").exists()


@pytest.mark.slow
def test_killed_at_any_time_a_run_ends_the_same():
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/soak.py"), "kills", "--count", "4", "--seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    result = json.loads(done.stdout)
    assert result["different"] == []
    assert result["runs"] == 4
    assert result["kills"] >= 4
    assert set(soak.RUNS) == {"madpo_iter", "marlhf_iter"}
