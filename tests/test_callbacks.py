"""Evaluation, export, logging, clipping and step counts of whole runs."""

import csv
import math
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from peft import PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from pbrl_lightning import CurrentComparator
from pbrl_lightning.callbacks import AgentExport, CollectionProgress, JointEvaluation
from pbrl_lightning.callbacks.collection_progress import rounds_table
from pbrl_lightning.rounds import RoundRecord
from training_runs import (
    EVAL_ITEMS,
    SAMPLING,
    Recorder,
    make_data,
    make_module,
    make_team,
    make_trainer,
    perturb,
    round_files,
    same_weights,
    text_reward,
    weights_of,
)


def expected_evaluation(team, count):
    """Mean reward of one response to each of the first items, item by item."""
    scores = []
    for index, item in enumerate(EVAL_ITEMS[:count]):
        sample = team.sample([item], [index], num_candidates=1, sampling=SAMPLING, seed=0, stream="evaluation")[0]
        scores += text_reward(*[[text] for text in sample.completions(0)])
    return sum(scores) / len(scores)


class Watcher(Callback):
    """What an evaluation at each step must give, computed beside the run."""

    def __init__(self, count=4):
        self.count, self.expected = count, {}

    def on_train_start(self, trainer, pl_module):
        self.expected[0] = expected_evaluation(pl_module.team, self.count)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.expected[trainer.global_step] = expected_evaluation(pl_module.team, self.count)


# -- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "steps"), [(1, list(range(9))), (3, [0, 3, 6, 8]), (16, [0, 8])])
def test_when_evaluation_happens_and_what_it_says(tmp_path, interval, steps):
    evaluation, watcher = JointEvaluation(interval), Watcher()
    data = make_data(batch_size=1, pairs_per_sample=1, pair_selection="reward_gap")
    make_trainer(tmp_path, [evaluation, watcher], max_steps=8).fit(make_module(make_team(True), rounds=3), data)
    assert [step for step, _ in evaluation.results] == steps
    for step, value in evaluation.results:
        assert value == pytest.approx(watcher.expected[step], abs=1e-9)
    assert len(set(watcher.expected.values())) > 1


def test_the_number_of_evaluation_items(tmp_path):
    for samples, used in ((1, 1), (3, 3), (50, 5)):
        evaluation, watcher = JointEvaluation(0, samples), Watcher(used)
        make_trainer(tmp_path / str(samples), [evaluation, watcher], max_steps=1).fit(
            make_module(make_team(True), rounds=1), make_data()
        )
        assert evaluation.results[0][1] == pytest.approx(watcher.expected[0], abs=1e-9)


def test_accumulation_evaluates_once_per_update(tmp_path):
    calls = []
    evaluation = JointEvaluation(interval=1)
    data = make_data(batch_size=1, eval_metrics=lambda *c: calls.append(1) or {})
    trainer = make_trainer(tmp_path, [evaluation], accumulate_grad_batches=4)
    trainer.fit(make_module(make_team(True), rounds=1), data)
    assert [step for step, _ in evaluation.results] == list(range(trainer.global_step + 1))
    assert len(calls) == trainer.global_step + 1


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_evaluation_changes_no_training_result(tmp_path, lora):
    found = []
    for name, options, evaluation in (
        ("without", {"eval_items": None}, JointEvaluation()),
        ("seldom", {}, JointEvaluation(0)),
        ("often", {"eval_metrics": lambda *c: {"x": torch.rand(1).item()}}, JointEvaluation(1, 5)),
    ):
        team = make_team(lora)
        make_trainer(tmp_path / name, [evaluation]).fit(make_module(team, rounds=2), make_data(**options))
        found.append((weights_of(team), round_files(tmp_path / name / "replay")))
    for weights, files in found[1:]:
        assert same_weights(weights, found[0][0])
        assert files == found[0][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"interval": -1}, "`interval` must be >= 0"), ({"num_samples": 0}, "`num_samples` must be >= 1")],
)
def test_evaluation_options(options, message):
    with pytest.raises(ValueError, match=message):
        JointEvaluation(**options)


def test_metrics_are_called_like_the_reward(tmp_path):
    seen = []

    def plain(first, second):
        return {"letters": len(first)}

    def asking(first, second, prompts, batch_items):
        seen.append((prompts, batch_items))
        return {"letters": len(first)}

    for metrics in (plain, asking):
        data = make_data(eval_metrics=metrics)
        trainer = make_trainer(tmp_path, [JointEvaluation(0)], logger=CSVLogger(tmp_path, version=metrics.__name__))
        trainer.fit(make_module(make_team(True), rounds=1), data)
        rows = read_csv(tmp_path / "lightning_logs" / metrics.__name__)
        assert [float(row["eval/letters"]) for row in rows if row["eval/letters"]] == [4.0, 4.0]
    assert seen[0] == ([["v", "w", "x", "y"]] * 2, EVAL_ITEMS[:4])
    with pytest.raises(TypeError, match="`eval_metrics` must return a dict of numbers, got float"):
        make_trainer(tmp_path).fit(make_module(make_team(True), rounds=1), make_data(eval_metrics=lambda *c: 1.0))


# -- logs ----------------------------------------------------------------------------------------------------------


def read_csv(directory):
    with (Path(directory) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


ROUND_NAMES = (
    "iter/current_iteration",
    "iter/current_preference_pairs",
    "iter/total_preference_pairs",
    "iter/train_preference_pairs",
)
STEP_NAMES = ("train/loss", "train/margin", "train/preference_accuracy", "turn_1/reward_mean", "turn_1/expected_return")
EVAL_NAMES = ("eval/turn_1/reward_mean", "eval/turn_1/expected_return")


class Batches(Callback):
    """The candidate means and joint responses sampled when each step was made."""

    def __init__(self):
        self.steps = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps[trainer.global_step] = (batch.candidate_reward_means.mean().item(), trainer.datamodule.env_step)


def test_logged_names_and_values_in_csv_and_tensorboard(tmp_path):
    batches, evaluation = Batches(), JointEvaluation(2)
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]
    data = make_data(num_candidates=5)
    trainer = make_trainer(tmp_path, [batches, evaluation], logger=loggers, log_every_n_steps=1)
    trainer.fit(make_module(make_team(True), rounds=2), data)
    rows = read_csv(tmp_path / "csv" / "version_0")
    events = EventAccumulator(str(tmp_path / "tb" / "version_0"))
    events.Reload()

    def of_csv(name):
        return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}

    def of_events(name):
        return {event.step: event.value for event in events.Scalars(name)}

    first, second = data.rounds
    starts = [first.first_step, second.first_step]
    expected = {
        "iter/current_iteration": [1, 2],
        "iter/current_preference_pairs": [first.collected_pairs, second.collected_pairs],
        "iter/total_preference_pairs": [first.collected_pairs, first.collected_pairs + second.collected_pairs],
        "iter/train_preference_pairs": [first.train_pairs, second.train_pairs],
        "collect/reward_mean": [first.reward_mean, second.reward_mean],
        "collect/comparator_reward_mean": [first.comparator_reward_mean, second.comparator_reward_mean],
        "collect/dropped_candidates": [0, 0],
        "collect/truncated_prompts": [0, 0],
    }
    for name, values in expected.items():
        assert of_csv(name) == pytest.approx(dict(zip(starts, values, strict=True)), rel=1e-6), name
        assert of_events(name) == pytest.approx(of_csv(name), rel=1e-6)
    assert all(value > 0 for value in of_csv("collect/tokens_per_second").values())
    for name in STEP_NAMES:
        assert of_csv(name).keys() == of_events(name).keys() == batches.steps.keys()
        assert of_events(name) == pytest.approx(of_csv(name), rel=1e-5)
    means = {step: mean for step, (mean, _) in batches.steps.items()}
    assert of_csv("turn_1/reward_mean") == pytest.approx(means, rel=1e-5)
    assert of_csv("turn_1/expected_return") == of_csv("turn_1/reward_mean")
    for name in EVAL_NAMES:
        assert of_csv(name) == pytest.approx(dict(evaluation.results), rel=1e-6)
        assert of_events(name) == pytest.approx(dict(evaluation.results), rel=1e-6)
    # env_step counts joint responses of both sides: 3 items x 5 candidates x 2 a round.
    assert {env for _, env in batches.steps.values()} == {30, 60}
    assert {float(row["env_step"]) for row in rows if row["env_step"]} == {30.0, 60.0}
    # With the tiny team's margins (hundreds of nats apart at times) the loss is still a number.
    assert all(math.isfinite(value) for name in STEP_NAMES for value in of_csv(name).values())
    check_table(events, evaluation)


def check_table(events, evaluation):
    tables = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("eval/samples/text_summary")
    }
    assert list(tables) == [step for step, _ in evaluation.results]
    for step, mean in evaluation.results:
        lines = tables[step].splitlines()
        assert len(lines) == 2 + 4
        head, *cells = [re.findall(r"<pre>(.*?)</pre>", line) for line in (lines[0], *lines[2:])]
        assert head == ["item", "reward", "prompt", "agent 0", "agent 1"]
        assert [(row[0], row[2]) for row in cells] == [(str(place), letter) for place, letter in enumerate("vwxy")]
        assert sum(float(row[1]) for row in cells) / 4 == pytest.approx(mean, abs=2e-3)


def test_dropped_candidates_and_truncated_prompts_are_logged(tmp_path):
    def reward(*completions):
        return [None if k == 0 else score for k, score in enumerate(text_reward(*completions))]

    team = make_team(True, max_prompt_length=1)
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match="cut on the left"):
        trainer.fit(make_module(team, rounds=2), make_data(reward, eval_items=None))
    rows = [row for row in read_csv(trainer.log_dir) if row["iter/current_iteration"]]
    assert [float(row["collect/dropped_candidates"]) for row in rows] == [6.0, 12.0]  # 3 items, 2 sides, 1 each
    assert float(rows[0]["collect/truncated_prompts"]) >= 3 * 2 * 2


def test_fault_B37_a_round_without_scores_leaves_its_means_out(tmp_path):
    calls = []

    def reward(*completions):
        calls.append(1)
        return [None] * len(completions[0]) if len(calls) <= 6 else text_reward(*completions)

    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match="dropped"):
        trainer.fit(make_module(make_team(True), rounds=2), make_data(reward, eval_items=None))
    rows = [row for row in read_csv(trainer.log_dir) if row["iter/current_iteration"]]
    assert [row["collect/reward_mean"] != "" for row in rows] == [False, True]
    assert "nan" not in (Path(trainer.log_dir) / "metrics.csv").read_text().lower()


def test_fault_B36_a_bfloat16_run_logs_and_writes_plain_numbers(tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")]
    team = make_team(dtype="bfloat16")
    trainer = make_trainer(tmp_path, logger=loggers, precision="bf16-true", log_every_n_steps=1)
    trainer.fit(make_module(team, rounds=1), make_data())
    assert all(
        math.isfinite(float(row["train/loss"])) for row in read_csv(tmp_path / "csv" / "version_0") if row["train/loss"]
    )
    assert round_files(tmp_path / "csv" / "version_0" / "replay")["iteration_0001.json"]["num_pairs"] > 0


# -- checkpoints by the evaluation reward --------------------------------------------------------------------------


def test_fault_B85_the_best_checkpoint_by_evaluation_reward(tmp_path):
    evaluation = JointEvaluation(interval=1)
    best = ModelCheckpoint(
        tmp_path / "best",
        filename="{step}-{eval/turn_1/reward_mean:.3f}",
        monitor="eval/turn_1/reward_mean",
        mode="max",
        every_n_train_steps=1,
        auto_insert_metric_name=False,
    )
    trainer = make_trainer(tmp_path, [best, evaluation], enable_checkpointing=True)
    trainer.fit(make_module(make_team(True), rounds=2), make_data(batch_size=1))
    values = dict(evaluation.results)
    top = max(value for step, value in evaluation.results if step > 0)
    assert best.best_model_score.item() == pytest.approx(top, rel=1e-5)
    (path,) = set((tmp_path / "best").glob("*.ckpt")) - set(
        (tmp_path / "best").glob("round_*")
    )  # flat: the slash in the name makes no directory
    assert str(path) == best.best_model_path
    step = int(path.name.split("-")[0])
    assert values[step] == top


def test_fault_B38_a_first_evaluation_without_a_score_does_not_spoil_the_best(tmp_path):
    seen = []

    def reward(*completions):
        if completions[0] and len(completions[0]) == 1:  # evaluation of one item
            seen.append(1)
            return [None] if len(seen) <= 2 else [float(len(seen))]
        return text_reward(*completions)

    best = ModelCheckpoint(tmp_path / "best", monitor="eval/turn_1/reward_mean", mode="max", every_n_train_steps=1)
    evaluation = JointEvaluation(1, 1)
    trainer = make_trainer(tmp_path, [best, evaluation], enable_checkpointing=True, max_steps=4)
    with pytest.warns(UserWarning, match="dropped"):
        trainer.fit(make_module(make_team(True), rounds=1), make_data(reward))
    assert [step for step, _ in evaluation.results] == [2, 3, 4]
    assert best.best_model_score.item() == 5.0
    assert len(seen) == 5  # an evaluation without a score is not repeated at the same step


# -- export --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_export_is_the_trained_team(tmp_path, lora):
    team = make_team(lora)
    make_trainer(tmp_path, [AgentExport(str(tmp_path / "out"))]).fit(make_module(team, rounds=1), make_data())
    ids = torch.tensor([[0, 70, 71, 72, 73]])
    for agent in range(2):
        directory = tmp_path / "out" / f"agent_{agent}"
        if lora:
            base = AutoModelForCausalLM.from_pretrained(team.model(agent).name_or_path)
            model = PeftModel.from_pretrained(base, directory)
        else:
            model = AutoModelForCausalLM.from_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        with torch.no_grad(), team.active(agent):
            assert torch.equal(model.eval()(input_ids=ids).logits, team.model(agent)(input_ids=ids).logits)
        written = model.generate(**tokenizer("ab", return_tensors="pt"), max_new_tokens=3, do_sample=False)
        assert isinstance(tokenizer.decode(written[0]), str)


def test_export_goes_to_the_log_directory_and_on_demand(tmp_path):
    team = make_team(True)
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path))
    module = make_module(team, rounds=1)
    trainer.fit(module, make_data())
    assert (Path(trainer.log_dir) / "export" / "agent_1" / "adapter_config.json").exists()
    assert (Path(trainer.log_dir) / "replay" / "iteration_0001.json").exists()
    target = AgentExport(str(tmp_path / "again")).export(trainer, module)
    assert sorted(path.name for path in target.iterdir()) == ["agent_0", "agent_1"]


# -- optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "rate", "expected"), [(False, None, 5e-6), (True, None, 1e-4), (True, 3e-3, 3e-3), (False, 3e-3, 3e-3)]
)
def test_groups_rates_and_weight_decay(tmp_path, lora, rate, expected):
    team = make_team(lora)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_module(team, rounds=1, learning_rate=rate), make_data(eval_items=None))
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["name"] for group in optimizer.param_groups] == ["agent_0", "agent_1"]
    assert [group["lr"] for group in optimizer.param_groups] == [expected] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01] * 2
    for agent, group in enumerate(optimizer.param_groups):
        assert {id(p) for p in group["params"]} == {id(p) for p in team.agent_parameters(agent).values()}


def seen_gradients(root, *, scale=1.0, uneven=False, dtype="float64", **options):
    """The gradients of each update of one epoch, as the optimizer saw them."""
    batch_size = options.pop("batch_size", 2)
    team = perturb(make_team(dtype=dtype).load(), 1)
    module = make_module(team, rounds=1, dpo_beta=0.01, score_last_token=True, learning_rate=1e-12)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx) * scale
    if uneven:
        with torch.no_grad():
            list(team.agent_parameters(1).values())[-1].mul_(30)
    found = []

    def keep(optimizer, args, kwargs):
        found.append(
            [torch.cat([p.grad.flatten().double() for p in group["params"]]) for group in optimizer.param_groups]
        )

    original = module.configure_optimizers

    def configure_optimizers():
        optimizer = original()
        optimizer.register_step_post_hook(keep)  # the closure runs inside the step: what is there now was applied
        return optimizer

    module.configure_optimizers = configure_optimizers
    trainer = make_trainer(root, **options)
    data = make_data(eval_items=None, num_candidates=4, pairs_per_sample=None, batch_size=batch_size)
    trainer.fit(module, data)
    return found, trainer, data.rounds[0].train_pairs


def test_fault_B72_each_group_is_clipped_by_itself(tmp_path):
    free, *_ = seen_gradients(tmp_path / "a", scale=1e6, uneven=True)
    clipped, *_ = seen_gradients(tmp_path / "b", scale=1e6, uneven=True, gradient_clip_val=1.0)
    assert len(free) == len(clipped) > 1
    sizes = [[group.norm().item() for group in step] for step in free]
    assert sum(size > 1 for step in sizes for size in step) > len(sizes)
    assert max(sizes[0]) / min(sizes[0]) > 2  # a clip over both agents would leave one far below 1
    for step, loose in zip(clipped, free, strict=True):
        for group, other in zip(step, loose, strict=True):
            if other.norm() <= 1:  # both sides say the same
                assert group.norm() <= 1
                continue
            assert group.norm().item() == pytest.approx(1.0, rel=1e-4)
            assert torch.nn.functional.cosine_similarity(group, other, dim=0).item() > 1 - 1e-5


def test_small_gradients_are_not_scaled_up_and_values_can_be_clipped(tmp_path):
    free, *_ = seen_gradients(tmp_path / "a")
    loose, *_ = seen_gradients(tmp_path / "b", gradient_clip_val=1e9)
    assert all(torch.equal(a, b) for a, b in zip(free[0], loose[0], strict=True))
    limit = free[0][0].abs().max().item() / 3
    cut, *_ = seen_gradients(tmp_path / "c", gradient_clip_val=limit, gradient_clip_algorithm="value")
    assert torch.allclose(cut[0][0], free[0][0].clamp(-limit, limit), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (1, 8), (3, 2)])
def test_fault_B35_B71_accumulated_gradients_are_those_of_one_big_batch(tmp_path, batch_size, accumulation):
    size = batch_size * accumulation
    whole, trainer, pairs = seen_gradients(tmp_path / "whole", batch_size=size)
    parts, other, _ = seen_gradients(tmp_path / "parts", batch_size=batch_size, accumulate_grad_batches=accumulation)
    assert pairs % size  # a short tail too
    assert trainer.global_step == other.global_step == math.ceil(pairs / size) == len(whole) == len(parts)
    for big, small in zip(whole, parts, strict=True):
        for a, b in zip(big, small, strict=True):
            assert a.norm() > 1e-6
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


def test_fault_B69_steps_are_updates_whatever_the_number_of_agents(tmp_path):
    for agents in (1, 3):
        team = make_team(True, num_agents=agents)
        saver = ModelCheckpoint(
            tmp_path / str(agents),
            filename="{step}",
            every_n_train_steps=2,
            save_top_k=-1,
            auto_insert_metric_name=False,
        )
        trainer = make_trainer(tmp_path, [saver], enable_checkpointing=True, max_steps=5)
        data = make_data(batch_size=1, replay_dir=str(tmp_path / f"replay_{agents}"))
        trainer.fit(make_module(team, rounds=6), data)
        assert trainer.global_step == 5
        assert sorted(path.name for path in (tmp_path / str(agents)).glob("?.ckpt")) == ["2.ckpt", "4.ckpt"]


def test_fault_B32_models_stay_in_eval_mode_in_training(tmp_path):
    modes = []

    class Modes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            modes.append(any(module.training for backbone in pl_module.team.backbones for module in backbone.modules()))

    team = make_team().load()
    flags = {name: parameter.requires_grad for name, parameter in team.named_parameters()}
    make_trainer(tmp_path, [Modes()]).fit(make_module(team, rounds=2), make_data())
    assert modes
    assert not any(modes)
    assert {name: parameter.requires_grad for name, parameter in team.named_parameters()} == flags


def test_a_loss_that_is_not_finite_stops_with_the_weights_untouched(tmp_path):
    team = make_team().load()
    before = weights_of(team)

    class Break(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            with torch.no_grad():
                list(pl_module.team.agent_parameters(1).values())[-1].fill_(float("inf"))

    with pytest.raises(FloatingPointError, match=r"batch 0.*agent 1|agent 1.*batch 0"):
        make_trainer(tmp_path, [Break()]).fit(make_module(team, rounds=1), make_data(eval_items=None))
    after = weights_of(team)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


# -- callbacks of a run --------------------------------------------------------------------------------------------


def test_callbacks_come_by_themselves_and_the_users_own_are_kept(tmp_path):
    class Mine(JointEvaluation):
        pass

    mine = Mine(interval=0)
    trainer = make_trainer(tmp_path, [mine])
    trainer.fit(make_module(make_team(True), rounds=1), make_data())
    evaluations = [callback for callback in trainer.callbacks if isinstance(callback, JointEvaluation)]
    assert evaluations == [mine]
    assert sum(isinstance(callback, CollectionProgress) for callback in trainer.callbacks) == 1
    assert sum(isinstance(callback, AgentExport) for callback in trainer.callbacks) == 1
    assert [step for step, _ in mine.results] == [0, trainer.global_step]


def test_progress_of_a_collection(tmp_path):
    class Progress(Recorder):
        def on_collection_progress(self, trainer, pl_module, done, total):
            self.events.append((done, total))

    progress = Progress()
    make_trainer(tmp_path, [progress]).fit(
        make_module(make_team(True), rounds=1), make_data(comparator=CurrentComparator())
    )
    told = [event for event in progress.events if isinstance(event, tuple)]
    assert told[-1] == (6, 6)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_the_table_of_rounds():
    def record(number, first, mean, other):
        return RoundRecord(number, 10 * number, 5, mean, other, first, 1.0, 2.0)

    records = [record(1, 0, 0.25, None), record(2, 4, None, 0.5), record(3, 9, 0.75, 0.125)]
    lines = rounds_table(records, [(0, 0.1), (4, 0.2), (8, 0.3), (12, 0.4)]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "10", "5", "0.250", "-", "0.100", "0.200"],
        ["2", "20", "5", "-", "0.500", "0.200", "0.300"],
        ["3", "30", "5", "0.750", "0.125", "0.300", "0.400"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert rounds_table(records[:1], []).splitlines()[1].split() == ["1", "10", "5", "0.250", "-", "-", "-"]
