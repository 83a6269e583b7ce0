"""Two processes (gloo, on the CPU) are one process with the same global batch; a failure of one ends both."""

import re
import time

import pytest
import torch

from process_runs import TIES, ends, gap, run_jobs, start
from training_runs import round_files

pytestmark = pytest.mark.slow
RUNS = ["madpo", "madpo_iter", "marlhf", "marlhf_iter", "magrpo", "maac", "iac"]
ITERATIVE = ["madpo_iter", "marlhf_iter"]
STOP = 8  # within the second round

SAME = {run: {"run": run} for run in RUNS}
SAME |= {f"{run} float32": {"run": run, "dtype": "float32"} for run in ITERATIVE}
SAME |= {f"{run} ties": {"run": run, "ties": TIES} for run in ITERATIVE}
SAME |= {"lora": {"run": "madpo_iter", "lora": True, "checkpointing": True}}
SAME |= {"held out": {"run": "madpo", "held_out": True}}
SAME |= {"halves": {"run": "magrpo", "halves": True}}
WITHIN = {"within": {"run": "magrpo", "halves": True, "stop": 3}}  # between the two updates of the second rollout
STOPPED = {f"{run} stopped": {"run": run, "stop": STOP} for run in ITERATIVE}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The same jobs in one process and in two, and what was stopped in one resumed in the other."""
    root = tmp_path_factory.mktemp("processes")
    jobs = {**SAME, **STOPPED, **WITHIN}
    for world in (1, 2):
        run_jobs(root / str(world), {**jobs, "accumulated": {"run": "madpo", "accumulate": world}}, world)
    for world, other in ((1, 2), (2, 1)):
        resumed = {}
        for name, job in STOPPED.items():
            checkpoint = root / str(other) / name / "checkpoints" / f"{STOP}.ckpt"
            resumed[name] = {"run": job["run"], "resume": str(checkpoint)}
        within = root / str(world) / "within" / "checkpoints" / "3.ckpt"
        resumed["within"] = {"run": "magrpo", "halves": True, "resume": str(within)}
        run_jobs(root / f"resumed in {world}", resumed, world)
    return root


def assert_same_run(root, name, tolerance):
    (alone,), both = ends(root / "1", name, 1), ends(root / "2", name, 2)
    assert round_files(root / "1" / name / "replay") == round_files(root / "2" / name / "replay")
    for end in both:
        for what in ("steps", "env_step", "rounds", "evaluations"):
            assert end[what] == alone[what], what
        assert gap(end["weights"], alone["weights"]) < tolerance
    assert gap(both[0]["weights"], both[1]["weights"]) == 0  # B74: the same on both
    return alone


@pytest.mark.parametrize("run", RUNS)
def test_fault_B74_B77_two_processes_are_one(ran, run):
    assert assert_same_run(ran, run, 1e-9)["steps"] >= 20


def test_held_out_pairs_add_up_over_processes_and_change_no_weight(ran):
    alone = assert_same_run(ran, "held out", 1e-9)
    assert set(alone["held_out"]) == {"val/loss", "val/preference_accuracy", "val/margin"}
    for end in ends(ran / "2", "held out", 2):
        assert end["held_out"] == pytest.approx(alone["held_out"], rel=1e-5)
    (plain,) = ends(ran / "1", "madpo", 1)
    assert gap(alone["weights"], plain["weights"]) == 0


@pytest.mark.parametrize("run", ITERATIVE)
def test_first_gradients_of_two_processes_in_float32(ran, run):
    (alone,) = ends(ran / "1", f"{run} float32", 1)
    for end in ends(ran / "2", f"{run} float32", 2):
        assert gap(end["gradients"], alone["gradients"]) < 1e-6


def test_fault_B64_adapters_on_one_backbone_with_checkpointing(ran):
    # Adapters are float32, and Adam makes much of the last bit of a small gradient.
    assert_same_run(ran, "lora", 1e-5)


@pytest.mark.parametrize("run", ITERATIVE)
def test_items_without_pairs_on_one_process(ran, run):
    assert_same_run(ran, f"{run} ties", 1e-9)
    files = round_files(ran / "2" / f"{run} ties" / "replay")
    prompts = {record["prompts"][0] for file in files.values() for record in file["pairs"]}
    assert prompts
    assert not prompts & set(TIES)


def test_accumulation_in_two_processes(ran):
    assert_same_run(ran, "accumulated", 1e-9)


@pytest.mark.parametrize("run", ITERATIVE)
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(ran, run, world):
    (whole,) = ends(ran / "1", run, 1)
    name = f"{run} stopped"
    for end in ends(ran / f"resumed in {world}", name, world):
        assert end["steps"] == whole["steps"]
        assert end["rounds"] == whole["rounds"]
        assert gap(end["weights"], whole["weights"]) < 1e-9
    before, after = ran / str(3 - world) / name, ran / f"resumed in {world}" / name
    files = round_files(before / "replay") | round_files(after / "replay")
    assert files == round_files(ran / "1" / run / "replay")


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_within_a_rollout_with_every_processs_own_part(ran, world):
    assert_same_run(ran, "halves", 1e-8)  # 40 steps of Adam
    wholes = ends(ran / str(world), "halves", world)
    for whole, end in zip(wholes, ends(ran / f"resumed in {world}", "within", world), strict=True):
        assert end["steps"] == whole["steps"]
        assert gap(end["weights"], whole["weights"]) == 0


@pytest.mark.parametrize("run", ["madpo_iter", "magrpo"])
def test_fault_B76_a_failure_on_one_process_ends_both_and_says_why(tmp_path, run):
    started = time.monotonic()
    job = {"run": run, "out": str(tmp_path / "out"), "world": 2, "fails": {"at": "d", "on": 1}}
    for process in start(tmp_path, [job], 2):
        assert process.wait(120) != 0
    assert time.monotonic() - started < 120
    other, failed = ((tmp_path / f"log_{rank}.txt").read_text() for rank in range(2))
    assert re.search(r"OracleError: `Reward` raised ValueError for task items? (1 to )?3 .*: the judge is out", failed)
    assert "OtherProcessError: process 1 failed: OracleError: `Reward` raised ValueError for task item" in other


@pytest.mark.parametrize(
    ("strategy", "told"),
    [("ddp", (0, 1)), ("ddp", (0,)), ("ddp", (1,)), ("sharded", (1,))],
    ids=["both", "the first", "the second", "the second of a sharded run"],
)
def test_fault_B86_processes_that_are_asked_to_stop_end_together(tmp_path, strategy, told):
    out = tmp_path / "out"
    job = {"run": "madpo_iter", "out": str(out), "world": 2, "seconds": 0.2, "strategy": strategy}
    processes = start(tmp_path, [job], 2)
    deadline = time.monotonic() + 90
    while len(list(out.rglob("rank_*.jsonl"))) < 2:  # both have sampled, and are scoring
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rank in told:
        processes[rank].terminate()
    assert [process.wait(30) != 0 for process in processes] == [True, True]
    assert torch.load(out / "checkpoints" / "stopped.ckpt", weights_only=True)["global_step"] <= 2
