"""Models shared out over processes (ShardedStrategy, gloo on the CPU) learn what one process learns."""

import re
import time

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pbrl_lightning import MADPOModule, MARLHFModule
from pbrl_lightning.sharding import deepcopy_detached, gathered, in_shares
from process_runs import TIES, ends, gap, run_jobs, start
from training_runs import make_data, make_team, make_trainer, round_files

STOP = 8  # within the second round
RUNS = {
    "madpo": {"run": "madpo"},
    "madpo_iter": {"run": "madpo_iter", "comparator": "history"},
    "copied": {"run": "madpo_iter", "comparator": "copy", "checkpointing": True},
    "lora": {"run": "marlhf_iter", "lora": True, "checkpointing": True},
    "marlhf_iter": {"run": "marlhf_iter", "ties": TIES},
    "magrpo": {"run": "magrpo"},
    "maac": {"run": "maac"},
    "iac": {"run": "iac", "lora": True},
}
FLOAT32 = {"float32": {"run": "marlhf_iter", "dtype": "float32"}}
BF16 = {
    "bf16 true": {"run": "marlhf_iter", "dtype": "bfloat16", "precision": "bf16-true", "lora": True},
    "bf16 mixed": {"run": "madpo", "dtype": "float32", "precision": "bf16-mixed"},
}
STOPPED = {"full": {"run": "marlhf_iter"}, "adapters": {"run": "madpo_iter", "lora": True}}


def sharded(jobs):
    return {name: {**job, "strategy": "sharded"} for name, job in jobs.items()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The same jobs in one process and shared out over two, and what was stopped in one way resumed in the other."""
    root = tmp_path_factory.mktemp("sharding")
    stopped = {f"{name} stopped": {**job, "stop": STOP} for name, job in STOPPED.items()}
    run_jobs(root / "1", {**RUNS, **FLOAT32, **STOPPED, **stopped}, 1)
    run_jobs(root / "2", {**sharded({**RUNS, **FLOAT32, **BF16, **stopped}), "ddp": {"run": "madpo"}}, 2)
    for world, other in ((1, 2), (2, 1)):
        resumed = {
            name: {**job, "resume": str(root / str(other) / f"{name} stopped" / "checkpoints" / f"{STOP}.ckpt")}
            for name, job in STOPPED.items()
        }
        run_jobs(root / f"resumed in {world}", sharded(resumed) if world == 2 else resumed, world)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_fault_B87_a_sharded_run_is_a_run_of_one_process(ran, name):
    (alone,), both = ends(ran / "1", name, 1), ends(ran / "2", name, 2)
    assert round_files(ran / "1" / name / "replay") == round_files(ran / "2" / name / "replay")
    for end in both:
        for what in ("steps", "env_step", "rounds", "evaluations"):
            assert end[what] == alone[what], what
        assert gap(end["gradients"], alone["gradients"]) < 1e-12
        assert gap(end["weights"], alone["weights"]) < 1e-9


@pytest.mark.slow
def test_first_gradients_of_a_sharded_run_in_float32(ran):
    (alone,) = ends(ran / "1", "float32", 1)
    for end in ends(ran / "2", "float32", 2):
        assert gap(end["gradients"], alone["gradients"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", BF16)
def test_adapters_and_heads_keep_their_precision(ran, name):
    for end in ends(ran / "2", name, 2):
        assert {value.dtype for value in end["weights"].values()} == {torch.float32}
        assert all(value.isfinite().all() for value in end["weights"].values())


@pytest.mark.slow
def test_fault_B87_each_process_holds_its_share_and_no_more_after_a_collection(ran):
    whole = ends(ran / "2", "ddp", 2)[0]["held"]
    for end in ends(ran / "2", "madpo", 2):
        assert max(end["held"]) < 0.55 * min(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("world", [1, 2])
def test_a_sharded_run_goes_on_in_one_process_and_the_other_way_round(ran, name, world):
    (whole,) = ends(ran / "1", name, 1)
    for end in ends(ran / f"resumed in {world}", name, world):
        assert end["steps"] == whole["steps"]
        assert gap(end["weights"], whole["weights"]) < 1e-9


@pytest.mark.slow
def test_what_a_sharded_run_exports_is_what_it_learned(ran):
    export = ran / "2" / "marlhf_iter" / "export"
    weights = ends(ran / "2", "marlhf_iter", 2)[0]["weights"]
    for place, kind, prefix in (
        ("agent_1", AutoModelForCausalLM, "team.backbones.1."),
        ("reward_model", AutoModelForSequenceClassification, "reward_model.classifier."),
    ):
        saved = dict(kind.from_pretrained(export / place, dtype=torch.float64).named_parameters())
        learned = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        assert learned
        assert gap({name: saved[name] for name in learned}, learned) == 0


@pytest.mark.slow
def test_fault_B76_a_failure_on_one_process_ends_a_sharded_run(tmp_path):
    started = time.monotonic()
    fails = {"fails": {"at": "d", "on": 1}, "strategy": "sharded"}
    job = {"run": "magrpo", "out": str(tmp_path / "out"), "world": 2, **fails}
    for process in start(tmp_path, [job], 2):
        assert process.wait(120) != 0
    assert time.monotonic() - started < 120
    assert re.search("OracleError.*the judge is out", (tmp_path / "log_1.txt").read_text())
    assert "OtherProcessError: process 1 failed" in (tmp_path / "log_0.txt").read_text()


@pytest.mark.parametrize("strategy", [ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy])
def test_other_sharding_strategies_name_ours(tmp_path, strategy):
    module = MADPOModule(make_team())
    module.trainer = make_trainer(tmp_path)
    module.trainer.strategy.__class__ = strategy
    module.trainer.strategy.config = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=rf"{strategy.__name__}.*pbrl_lightning\.ShardedStrategy"):
        module.configure_model()


def test_deepspeed_is_refused_where_two_phases_alternate(tmp_path):
    module = MARLHFModule(make_team())
    module.trainer = make_trainer(tmp_path)
    module.trainer.strategy.__class__ = DeepSpeedStrategy
    with pytest.raises(ValueError, match=r"DeepSpeed.*ShardedStrategy"):
        module.configure_model()


def test_without_a_sharded_strategy_nothing_changes(tmp_path):
    team = make_team().load()
    with gathered(team):
        assert not in_shares(team)
    copy = deepcopy_detached(team.backbone(0))
    assert isinstance(copy, nn.Module)
    assert not any(p.requires_grad for p in copy.parameters())
    make_trainer(tmp_path, max_epochs=1).fit(MADPOModule(team, num_train_epochs=1), make_data(iterative=False))
