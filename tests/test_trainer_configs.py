"""`configs/trainer/`: strategies put behind a run's config, and the script for SLURM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from pbrl_lightning.cli import main

ROOT = Path(__file__).parent.parent
TRAINER = ROOT / "configs" / "trainer"
STRATEGIES = sorted(path.name for path in TRAINER.glob("*.yaml"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_changes_nothing_but_the_trainer(name, capsys):
    found = []
    for configs in ([], [f"--config={TRAINER / name}"]):
        with pytest.raises(SystemExit) as exit_:
            main(["fit", f"--config={ROOT}/configs/madpo_iter.yaml", *configs, "--print_config"])
        assert exit_.value.code == 0
        found.append(yaml.safe_load(capsys.readouterr().out))
    plain, scaled = found
    given = yaml.safe_load((TRAINER / name).read_text())["trainer"]
    assert plain["trainer"]["strategy"] == "auto"
    assert scaled["trainer"]["strategy"] != "auto"
    assert scaled["trainer"].pop("strategy") == given["strategy"] or isinstance(given["strategy"], dict)
    del plain["trainer"]["strategy"]
    assert scaled == {**plain, "trainer": {**plain["trainer"], **{k: v for k, v in given.items() if k != "strategy"}}}


@pytest.mark.slow
@pytest.mark.parametrize(("run", "strategy"), [("madpo_iter", "ddp"), ("marlhf_iter", "fsdp")])
def test_two_processes_by_the_command_line(tmp_path, run, strategy):
    command = [sys.executable, "-m", "pbrl_lightning", "fit", f"--config={ROOT}/configs/debug/{run}.yaml"]
    command += [f"--config={TRAINER / strategy}.yaml", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"--trainer.default_root_dir={tmp_path}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("trained models: ") == 1  # said by one of them
    (checkpoint,) = tmp_path.rglob("epoch=*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["state_dict"]
    assert {path.name for path in next(tmp_path.rglob("export")).iterdir()} >= {"agent_0", "agent_1"}


@pytest.mark.parametrize("begun", [False, True])
def test_the_slurm_script_starts_a_run_and_goes_on_with_it(tmp_path, begun):
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    run = tmp_path / "my run"
    if begun:
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "stopped.ckpt").touch()
    place = {"RUN": str(run), "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    command = ["bash", str(TRAINER / "slurm.sh"), "a.yaml", "b.yaml"]
    environment = {**os.environ, **place, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    root = ["--trainer.default_root_dir", str(run), "--config", "a.yaml", "--config", "b.yaml"]
    resumed = ["--ckpt_path", str(run)] if begun else []
    sizes = ["--trainer.num_nodes", "2", "--trainer.devices", "4"]
    assert said.splitlines() == ["pbrl", "fit", *root, *resumed, *sizes]
