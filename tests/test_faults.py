"""Faults of neighbouring projects (by number) that show in whole runs, and not in one part alone."""

import csv
import json
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers import pad_ids, save_model, tiny
from pbrl_lightning import (
    AgentTeam,
    CurrentComparator,
    HistoryComparator,
    ModelComparator,
    PreferenceDataModule,
)
from pbrl_lightning.agents import answering
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.agents.prompts import ChatTemplate
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.callbacks import JointEvaluation
from pbrl_lightning.comparators.base import CollectionPhase
from pbrl_lightning.preferences.pair_tokens import PairLoader, collate_rows, trainable_pairs
from pbrl_lightning.preferences.round_files import write_round_file
from pbrl_lightning.rounds import RoundCallback
from training_runs import (
    ITEMS,
    SAMPLING,
    CountingReward,
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

BOS = 0
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def text_pair(prompts, winner, loser):
    return PreferencePair(prompts, winner, loser, 1.0, 0.0, 0.5)


def logged_rows(root):
    """The rows of a CSV logger, empty cells left out."""
    (path,) = root.rglob("metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def strict_json(text):
    """Parses as RFC 8259 has it: no NaN, no Infinity."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


class Spy(Callback):
    """The batches of a run and the gradients that its optimizer saw."""

    def __init__(self):
        self.batches, self.gradients = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        # Gradients are cleared before the next backward, so these are what the update of this batch was made of.
        if trainer.global_step > self._step:
            self.gradients.append(
                [
                    {name: p.grad.detach().clone() for name, p in pl_module.team.agent_parameters(agent).items()}
                    for agent in range(pl_module.team.num_agents)
                ]
            )


def norm(gradients):
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))


# -- special tokens ------------------------------------------------------------------------------------------------


def test_fault_B05_a_merge_across_the_border_changes_neither_ids_nor_mask():
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, ".": 3, "b": 4, ".b": 5, "aa": 6, "ba": 7}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(".", "b"), ("a", "a"), ("b", "a")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    assert tokenizer("a.ba", add_special_tokens=False)["input_ids"] == [2, 5, 2]
    team = AgentTeam([tiny("llama")], tokenizers=tokenizer).load()
    kept, tokens = trainable_pairs(team, [text_pair(["a."], ["ba"], ["b"]), text_pair(["a"], ["a"], ["a.ba"])])
    for batch in PairLoader(pad_ids(team), kept, tokens, 1, 0):
        (table,) = batch.agents
        for side, ids in enumerate(table.input_ids):
            prompt, winner, loser = next(
                (t.prompts[0], t.winner[0], t.loser[0])
                for t in tokens
                if t.prompts[0] == ids[: len(t.prompts[0])].tolist()
            )
            response = (winner, loser)[side]
            assert ids[table.attention_mask[side]].tolist() == prompt + response
            assert int(table.response_mask[side].int().argmax()) == len(prompt)
    assert [t.prompts[0] + t.winner[0] for t in tokens] == [[2, 3, 7], [2, 2]]


@pytest.mark.parametrize("iterative", [False, True])
def test_fault_B06_B07_exactly_one_bos_wherever_a_prompt_goes(tmp_path, iterative, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = BOS_TEMPLATE
    team = AgentTeam(
        [tiny("llama", torch.float32, seed=seed) for seed in range(2)],
        tokenizers=tokenizer,
        formatters=[ChatTemplate("{prompt}", system="Be brief."), "{prompt}"],
    )
    sampled = []
    sample = answering.sample_responses

    def spy(model, prompts, *rest):
        sampled.extend(prompts)
        return sample(model, prompts, *rest)

    monkeypatch.setattr(answering, "sample_responses", spy)
    seen = Spy()
    data = make_data(iterative=iterative, eval_items=None)
    make_trainer(tmp_path, [seen]).fit(make_module(team, 1 if iterative else None, num_train_epochs=1), data)
    trained = {
        agent: {
            tuple(ids[attended & ~response].tolist())
            for batch in seen.batches
            for ids, attended, response in zip(
                batch.agents[agent].input_ids,
                batch.agents[agent].attention_mask,
                batch.agents[agent].response_mask,
                strict=True,
            )
        }
        for agent in range(2)
    }
    for prompts in (sampled, *trained.values()):
        assert prompts
        assert all(ids[0] == BOS and list(ids).count(BOS) == 1 for ids in prompts)
    assert trained[0] | trained[1] <= set(map(tuple, sampled))
    assert trained[1] == {tuple(tokenizer(item["prompt"])["input_ids"]) for item in ITEMS}


def test_fault_B12_short_and_long_pairs_together_leave_no_response_empty(tmp_path):
    path = save_model(tiny("gpt2", torch.float32, n_positions=32), tmp_path / "model")
    team = AgentTeam(path, num_agents=1).load()
    pairs = [
        text_pair(["p"], ["abc"], ["xyz"]),
        text_pair(["q" * 30], ["w" * 20], ["l" * 28]),
        text_pair(["q" * 30], ["w" * 28], ["l" * 20]),
    ]
    with pytest.warns(UserWarning, match="cut on the left"):
        kept, tokens = trainable_pairs(team, pairs)
    (batch,) = PairLoader(pad_ids(team), kept, tokens, 3, 0)
    assert sorted(batch.agents[0].response_mask.sum(1).tolist()) == [3, 3, 20, 20, 28, 28]
    assert batch.agents[0].input_ids.shape[1] <= 32
    assert torch.isfinite(team.response_logps(0, batch.agents[0], True)).all()


# -- numbers -------------------------------------------------------------------------------------------------------


def test_fault_B24_one_candidate_is_an_error_or_compared_with_the_comparator(tmp_path):
    with pytest.raises(ValueError, match="one candidate makes no pair"):
        make_data(num_candidates=1, iterative=False)
    data = make_data(num_candidates=1)
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(make_module(rounds=2), data)
    assert trainer.global_step > 0
    assert all(math.isfinite(float(value)) for row in logged_rows(tmp_path) for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("lora", [False, True])
def test_fault_B36_half_precision_numbers_reach_logs_files_and_checkpoints(tmp_path, precision, lora):
    def reward(*completions):
        return torch.tensor(text_reward(*completions), dtype=torch.bfloat16, requires_grad=True)

    team = make_team(lora, "bfloat16" if precision == "bf16-true" else "float32")
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    saver = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    options = {"precision": precision, "logger": loggers, "log_every_n_steps": 1, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, [JointEvaluation(1), saver], **options)
    before = weights_of(team.load())
    trainer.fit(make_module(team, 2, learning_rate=1e-2), make_data(reward))
    assert not same_weights(weights_of(team), before)
    rows = logged_rows(tmp_path)
    assert any("train/loss" in row for row in rows)
    assert any("eval/turn_1/reward_mean" in row for row in rows)
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())
    for path in tmp_path.rglob("iteration_*.json"):
        for pair in strict_json(path.read_text(encoding="utf-8"))["pairs"]:
            assert type(pair["winner_reward"]) is float


def test_fault_B37_a_round_without_scores_leaves_no_nan_in_the_log(tmp_path):
    class Late(CountingReward):
        def __call__(self, *completions, prompts):
            if prompts[0][0] in "vwxyz":  # evaluation: one item has no score
                return [None if p == "x" else s for p, s in zip(prompts[0], text_reward(*completions), strict=True)]
            self.calls += 1
            return [None if self.calls <= 6 else score for score in text_reward(*completions)]

    data = make_data(Late())
    trainer = make_trainer(
        tmp_path, [JointEvaluation(1, num_samples=5)], logger=CSVLogger(tmp_path), log_every_n_steps=1
    )
    with pytest.warns(UserWarning, match="dropped"):
        trainer.fit(make_module(rounds=3), data)
    rows = logged_rows(tmp_path)
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())
    collected = [row for row in rows if "iter/current_iteration" in row]
    assert ["collect/reward_mean" in row for row in collected] == [False, True, True]
    assert ["collect/comparator_reward_mean" in row for row in collected] == [False, True, True]
    assert [record.train_pairs > 0 for record in data.rounds] == [False, True, True]
    evaluated = [float(row["eval/turn_1/reward_mean"]) for row in rows if "eval/turn_1/reward_mean" in row]
    assert len(evaluated) == trainer.global_step + 1


def test_fault_B84_totals_grow_and_are_not_reset_by_logging(tmp_path):
    data = make_data(eval_items=None)
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(make_module(rounds=3), data)
    collected = [row for row in logged_rows(tmp_path) if "iter/current_iteration" in row]
    totals = [float(row["iter/total_preference_pairs"]) for row in collected]
    assert totals == np.cumsum([record.collected_pairs for record in data.rounds]).tolist()
    assert [float(row["env_step"]) for row in collected] == [24.0, 48.0, 72.0]


def test_fault_B85_a_checkpoint_in_a_sub_folder_finds_its_rounds(tmp_path):
    # What Lightning makes of a metric name with slashes when it inserts metric names.
    def run(name, data, **options):
        saver = ModelCheckpoint(
            tmp_path / "best",
            monitor="eval/turn_1/reward_mean",
            every_n_train_steps=1,
            save_top_k=-1,
            filename="{step}-{eval/turn_1/reward_mean:.1f}",
        )
        team = make_team(True)
        settings = {"comparator": HistoryComparator(1), **data}
        trainer = make_trainer(tmp_path / name, [JointEvaluation(1), saver], enable_checkpointing=True)
        trainer.fit(make_module(team, 3), make_data(**settings), weights_only=True, **options)
        return weights_of(team)

    whole = run("one", {"replay_dir": str(tmp_path / "replay")})
    (checkpoint,) = (path for path in (tmp_path / "best").rglob("*.ckpt") if "step=2-" in str(path))
    assert checkpoint.parent != tmp_path / "best"
    for path in (tmp_path / "replay").iterdir():
        path.unlink()
    assert same_weights(run("two", {"replay_dir": str(tmp_path / "replay")}, ckpt_path=str(checkpoint)), whole)


# -- modes, adapters and gradients ---------------------------------------------------------------------------------


class Modes(RoundCallback):
    """The training flags of all modules before and after each collection."""

    def __init__(self):
        self.seen = []

    def on_round_start(self, trainer, pl_module, round_number):
        self.before = [(name, module.training) for name, module in pl_module.named_modules()]

    def on_round_collected(self, trainer, pl_module, record):
        self.seen.append(self.before == [(name, module.training) for name, module in pl_module.named_modules()])


def test_fault_B31_B32_dropout_stays_off_in_actors_and_comparator_through_a_fit(tmp_path):
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    team = AgentTeam(
        [tiny("gpt2", torch.float32, seed=seed, **dropout).train() for seed in range(2)], tokenizers=tiny_tokenizer()
    )
    other = tiny("gpt2", torch.float32, seed=7, **dropout).train()
    comparator = ModelComparator([other, other], tokenizers=tiny_tokenizer())
    modes, module = Modes(), make_module(team, 2)
    margins = []

    class Twice(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.train()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            margins.append([team.response_logps(0, batch.agents[0]).detach() for _ in range(2)])
            policies = [*team.backbones, other]
            assert not any(layer.training for policy in policies for layer in policy.modules())

    make_trainer(tmp_path, [modes, Twice()]).fit(module, make_data(comparator=comparator))
    assert modes.seen == [True, True]
    assert margins
    assert all(torch.equal(first, second) for first, second in margins)


def test_fault_B51_exactly_the_adapters_are_trained_whoever_spoke_last(tmp_path):
    team = perturb(make_team(True, "float64", num_agents=3).load(), 0)
    team.save(tmp_path / "initial")
    team.save(tmp_path / "iteration_0000")
    own = [set(map(id, team.agent_parameters(agent).values())) for agent in range(3)]
    trained = set().union(*own)
    assert all(own)
    assert len(trained) == sum(map(len, own))
    assert {id(p) for p in team.parameters() if p.requires_grad} == trained
    batch = collate_rows([[0, 5, 6]] * 2, [[7, 8], [9, 1]], 2)
    for comparator in (CurrentComparator(), HistoryComparator(1), HistoryComparator(2)):
        with comparator.session(team, CollectionPhase(2, tmp_path)) as speaker:
            speaker.sample(ITEMS, [0, 1, 2], num_candidates=2, sampling=SAMPLING, seed=0, stream="comparator")
        team.frozen_copy()
        for last in range(3):
            with team.active(last):
                pass
            optimizer = make_module(team).configure_optimizers()
            groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
            assert groups == own
            team.zero_grad(set_to_none=True)
            values = [team.response_logps(agent, batch) for agent in range(3)]
            torch.tanh(sum(values) / 50).sum().backward()
            assert {id(p) for p in team.parameters() if p.grad is not None} == trained
            assert all(p.grad.abs().max() > 0 for p in team.parameters() if p.requires_grad)
            team.zero_grad(set_to_none=True)
            team.response_logps(last, batch).sum().backward()
            assert {id(p) for p in team.parameters() if p.grad is not None} == own[last]


@pytest.fixture
def eight_pairs(tmp_path):
    """A round file of eight pairs of mixed length."""
    pairs = [
        text_pair(
            [f"{i}" * (1 + i % 3), "q" * (1 + i)], ["w" * (1 + i), f"{i}ww"], ["l" * (9 - i), f"l{i}"[: 1 + i % 2]]
        )
        for i in range(8)
    ]
    write_round_file(tmp_path / "iteration_0001.json", 1, pairs)
    return str(tmp_path / "iteration_0001.json")


def gradients_of(root, pairs, batch_size, lora=False, scale=1.0, learning_rate=1e-9, **options):
    """The updates of one epoch over the pairs: gradients as the optimizer saw them, and the number of steps."""
    team = perturb(make_team(lora, "float64").load(), 1)
    module, spy = make_module(team, num_train_epochs=1, learning_rate=learning_rate), Spy()
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx) * scale
    trainer = make_trainer(root, [spy], **options)
    trainer.fit(module, PreferenceDataModule(pairs=[pairs], batch_size=batch_size))
    return spy.gradients, trainer.global_step


@pytest.mark.parametrize("lora", [False, True])
def test_fault_B35_B71_accumulated_batches_are_one_batch(tmp_path, eight_pairs, lora):
    tolerance = 1e-6 if lora else 1e-10  # adapters are float32
    (whole,), steps = gradients_of(tmp_path, eight_pairs, 8, lora)
    assert steps == 1
    assert all(norm(agent) > 1e-3 for agent in whole)
    for batch_size, accumulation in ((2, 4), (1, 8), (3, 3)):
        (split,), steps = gradients_of(tmp_path, eight_pairs, batch_size, lora, accumulate_grad_batches=accumulation)
        assert steps == 1
        for one, other in zip(whole, split, strict=True):
            for name, gradient in one.items():
                torch.testing.assert_close(other[name], gradient, rtol=tolerance, atol=tolerance)
    found, steps = gradients_of(tmp_path, eight_pairs, 1, lora, accumulate_grad_batches=3)
    assert steps == len(found) == 3  # two whole groups and a rest


@pytest.mark.parametrize("lora", [False, True])
def test_fault_B71_B72_clipping_bounds_what_the_optimizer_sees(tmp_path, eight_pairs, lora):
    (free,), _ = gradients_of(tmp_path, eight_pairs, 8, lora)
    sizes = [norm(agent) for agent in free]
    for scale in (1e6, 1.0):
        (clipped,), steps = gradients_of(
            tmp_path, eight_pairs, 2, lora, scale, accumulate_grad_batches=4, gradient_clip_val=min(sizes) / 2
        )
        assert steps == 1
        # Each agent by itself, and the direction stays.
        for agent, size, other in zip(clipped, sizes, free, strict=True):
            assert norm(agent) == pytest.approx(min(sizes) / 2, rel=1e-4)
            for name, gradient in agent.items():
                torch.testing.assert_close(gradient, other[name] * (min(sizes) / 2 / size), rtol=1e-3, atol=1e-6)
    limit = sum(sizes) / 2  # between the two: one agent is clipped, the other is left alone
    (clipped,), _ = gradients_of(tmp_path, eight_pairs, 8, lora, gradient_clip_val=limit)
    assert [norm(agent) for agent in clipped] == pytest.approx([min(size, limit) for size in sizes], rel=1e-4)
    (clipped,), _ = gradients_of(
        tmp_path, eight_pairs, 8, lora, 1e6, gradient_clip_val=1e-3, gradient_clip_algorithm="value"
    )
    largest = [max(gradient.abs().max().item() for gradient in agent.values()) for agent in clipped]
    assert largest == pytest.approx([1e-3, 1e-3])


# -- files ---------------------------------------------------------------------------------------------------------


def test_fault_B90_a_half_written_checkpoint_is_named_and_trains_nothing(tmp_path, caplog):
    saver = ModelCheckpoint(tmp_path / "c", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(tmp_path, [saver], enable_checkpointing=True)
    trainer.fit(make_module(make_team(True), 2), make_data(eval_items=None))
    newest = max((tmp_path / "c").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    content, files = newest.read_bytes(), round_files(tmp_path / "replay")
    for length in (0, 1, len(content) // 2, len(content) - 1):
        newest.write_bytes(content[:length])
        reward, team = CountingReward(), make_team(True)
        before = weights_of(team.load())
        caplog.clear()
        with (
            caplog.at_level("INFO"),
            pytest.raises((EOFError, RuntimeError, OSError, ValueError, pickle.UnpicklingError)),
        ):
            make_trainer(tmp_path).fit(make_module(team, 2), make_data(reward, eval_items=None), ckpt_path=str(newest))
        assert str(newest) in caplog.text
        assert reward.calls == 0
        assert same_weights(weights_of(team), before)
    assert round_files(tmp_path / "replay") == files


def test_fault_B94_every_name_of_a_run_is_legal_on_windows(tmp_path):
    data = make_data(comparator=HistoryComparator(1))
    trainer = make_trainer(tmp_path, logger=TensorBoardLogger(tmp_path), enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(make_module(make_team(True), 2), data)
    names = [part for path in tmp_path.rglob("*") for part in path.relative_to(tmp_path).parts]
    assert any(name.endswith(".ckpt") for name in names)
    assert any(name.startswith("iteration_") for name in names)
    assert not [name for name in names if set(name) & set('<>:"/\\|?*') or name != name.rstrip(". ")]
