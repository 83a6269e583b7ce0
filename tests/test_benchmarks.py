"""The benchmarks run: on the tiny team, with a budget of seconds."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_quickstart_seeds_with_the_tiny_team(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/quickstart_seeds.py"), "--seeds", "3", "--json", "rows.json"]
    command += ["--config", str(ROOT / "configs/debug/madpo_iter.yaml"), "--model.init_args.num_iterations=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [(row["run"], row["seed"]) for row in rows] == [("quickstart", 3), ("control", 3)]
    assert rows[0]["before"] == rows[1]["before"]
    assert rows[0]["after"] != rows[1]["after"]


@pytest.mark.slow
def test_api_concurrency_with_a_quick_server():
    command = [sys.executable, str(ROOT / "benchmarks/api_concurrency.py"), "--latency", "0.05", "--candidates", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, *rows = (line.split() for line in done.stdout.strip().splitlines())
    assert [(row[0], row[1]) for row in rows] == [("1", "16"), ("2", "16"), ("4", "16"), ("8", "16")]


@pytest.mark.slow
def test_speed_with_the_tiny_team(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/speed.py"), "--tiny", "--repeats", "1", "--threads", "1"]
    command += ["--precisions", "fp32", "bf16", "mixed"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", "speed.json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))["rows"]
    both = [f"{length} {precision}" for precision in ("fp32", "bf16", "mixed") for length in ("short", "long")]
    lora = ["short fp32 LoRA", "long fp32 LoRA"]
    timed = [f"sampling {kind} K={count}" for kind in both + lora for count in (4, 6)]
    for update, kinds in (("MADPO update", both + lora), ("reward model update", both)):
        for kind in kinds:
            timed += [f"{update} {kind}", f"{update} {kind}, items apart"][: 1 + kind.startswith("long")]
    timed += [f"{what} {kind}" for what in ("policy step", "iterative round") for kind in both]
    kept = [f"memory {kind} N={count}" for kind in ("full", "LoRA") for count in (1, 2)]
    kept += [f"peak memory MADPO {length} fp32" for length in ("short", "long")]
    replays = [f"replay {how}, {rounds} rounds" for rounds in (1, 3) for how in ("all history", "lambda decay")]
    assert [row["name"] for row in rows] == timed + kept + replays
    numbers = [row["value"] for row in rows] + [
        row[key] for row in rows for key in ("seconds", "limit_share") if key in row
    ]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert [row["name"] for row in rows if "limit_share" in row] == timed
    assert [row["name"] for row in rows if "seconds" in row] == timed + replays
    # The table has the same rows.
    table = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert table == ["what", *(row["name"] for row in rows)]
    # A frozen backbone is kept once, without gradients and without optimizer state.
    by_name = {row["name"]: row for row in rows}
    assert by_name["memory full N=2"]["extra"]["times_one_model"] == pytest.approx(8, rel=1e-3)
    assert by_name["memory LoRA N=2"]["extra"]["times_one_model"] < 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "names"),
    [
        (
            [],
            [
                "sampling short fp32 K=4",
                "MADPO update short fp32",
                "reward model update short fp32",
                "policy step short fp32",
            ],
        ),
        (["--only", "madpo", "--precisions", "mixed", "bf16"], ["MADPO update short mixed", "MADPO update short bf16"]),
    ],
)
def test_speed_of_what_has_a_number_to_beat(tmp_path, said, names):
    command = [sys.executable, str(ROOT / "benchmarks/speed.py"), "--tiny", "--repeats", "1", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command += ["--goals", *said, "--lengths", "short", "--out", "speed.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == names


@pytest.mark.slow
def test_linear_cost_with_the_tiny_team(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/linear_cost.py"), "--tiny", "--threads", "1", "--out", "cost"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "cost.json").read_text(encoding="utf-8"))
    assert len(report) == 5
    assert all(seconds > 0 for series in report.values() for _, seconds in series["points"])
    assert (tmp_path / "cost.png").stat().st_size > 5000
