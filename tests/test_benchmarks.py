"""The benchmarks run: on the tiny team, with a budget of seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


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


def test_api_concurrency_with_a_quick_server():
    command = [sys.executable, str(ROOT / "benchmarks/api_concurrency.py"), "--latency", "0.05", "--candidates", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, *rows = (line.split() for line in done.stdout.strip().splitlines())
    assert [(row[0], row[1]) for row in rows] == [("1", "16"), ("2", "16"), ("4", "16"), ("8", "16")]
