"""Fitting a joint reward model: its loss against a literal loop, whole fits from pair files, and that it learns."""

import csv
import json
import math
import random
from contextlib import suppress
from statistics import fmean

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from test_resume import Killer, StopError
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from helpers import assert_close, tiny
from pbrl_lightning import JointRewardModel, JointRewardModule, LoraOptions, PairBatch, PreferenceDataModule
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.pair_source import held_out_split
from pbrl_lightning.preferences.pair_tokens import collate_rows
from pbrl_lightning.preferences.round_files import pair_to_record, write_round_file
from training_runs import make_trainer

PROMPTS = [[0, 10, 11, 12], [0, 30, 31], [0, 50]]
WINNERS = [[70, 71, 1], [72, 73, 74, 75], [76, 77]]
LOSERS = [[90, 91], [92, 93, 1], [94, 95, 96, 97]]
LORA = LoraOptions(r=2)


# The loss of a batch


def pair_batch(weights=None, rows=(0, 1, 2), loss_scale=None):
    prompts = [PROMPTS[row] for row in rows] * 2
    table = collate_rows(prompts, [WINNERS[row] for row in rows] + [LOSERS[row] for row in rows], pad_id=1)
    weights = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    return PairBatch([table], weights, loss_scale or 1 / len(rows), torch.full((len(rows),), 0.5))


def make_module(**options):
    reward = JointRewardModel(tiny("llama"), tokenizer=tiny_tokenizer(), **options).load()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reward.trained_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return JointRewardModule(reward)


def literal_score(reward, ids):
    states = reward.classifier.base_model(input_ids=torch.tensor([ids])).last_hidden_state
    return (states[0, len(ids) - 1].to(reward.head.weight.dtype) * reward.head.weight[0]).sum()


def gradients(reward, loss):
    return torch.autograd.grad(loss, reward.trained_parameters())


@pytest.mark.parametrize("options", [{}, {"lora": LORA}, {"freeze_backbone": True}, {"gradient_checkpointing": True}])
def test_loss_and_gradient_equal_a_loop_over_pairs(options):
    module = make_module(**options)
    reward, loss, margins = module.reward_model, 0.0, []
    for prompt, winner, loser in zip(PROMPTS, WINNERS, LOSERS, strict=True):
        margins.append(literal_score(reward, prompt + winner) - literal_score(reward, prompt + loser))
        loss = loss - logsigmoid(margins[-1]) / 3
    expected = gradients(reward, loss)
    actual, metrics = module.step(pair_batch(), "batch 0")
    assert_close(actual, loss, 1e-9)
    for value, reference in zip(gradients(reward, actual), expected, strict=True):
        assert_close(value, reference)  # by its dtype: adapters are float32
    assert max(value.abs().max() for value in expected) > 1e-2
    assert set(metrics) == {"reward/loss", "reward/accuracy", "reward/margin"}
    assert_close(metrics["reward/loss"], loss, 1e-9)
    assert_close(metrics["reward/margin"], sum(margins) / 3, 1e-9)
    assert_close(float(metrics["reward/accuracy"]), sum(float(margin > 0) for margin in margins) / 3)


def test_fault_B35_rows_of_weight_zero_and_split_batches_change_nothing():
    module = make_module()
    loss, metrics = module.step(pair_batch(), "batch 0")
    parts = [
        pair_batch(rows=(0, 1), loss_scale=1 / 3),
        pair_batch(rows=(2, 0), weights=[1.0, 0.0], loss_scale=1 / 3),
        pair_batch(rows=(1,), weights=[0.0], loss_scale=1 / 3),
    ]
    losses, found = zip(*(module.step(part, "batch 0") for part in parts), strict=True)
    assert_close(sum(losses), loss)
    expected = gradients(module.reward_model, loss)
    for value, reference in zip(gradients(module.reward_model, sum(losses)), expected, strict=True):
        assert_close(value, reference)
    assert found[2] == {}  # nothing to log of no pair
    means = {name: (2 * found[0][name] + found[1][name]) / 3 for name in metrics}
    for name, value in metrics.items():
        assert_close(means[name].double(), value.double(), 1e-6)


# Whole fits

ITEMS = [f"item {letter}" for letter in "abcdefghij"]


def make_pairs(per_item=2, items=ITEMS):
    draw = random.Random(0)
    words = iter(lambda: "".join(draw.choices("uvwxyz", k=draw.randint(1, 5))), None)
    return [
        PreferencePair([item, f"{item}!"], [next(words), next(words)], [next(words) + "L", next(words)], 1.0, 0.0, 0.5)
        for item in items
        for _ in range(per_item)
    ]


def write_pairs(path, pairs):
    write_round_file(path, 1, pairs)
    return str(path)


class Seen(Callback):
    """The texts of all batches."""

    def __init__(self):
        self.train, self.held_out = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.train += self.texts(batch)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.held_out += [] if trainer.sanity_checking else self.texts(batch)

    @staticmethod
    def texts(batch):
        texts = [text.replace("<pad>", "") for text in tiny_tokenizer().batch_decode(batch.agents[0].input_ids)]
        return list(zip(texts[: len(batch)], texts[len(batch) :], strict=True))


def joint_text(pair, side):
    prompts = "".join(f"### Prompt of agent {i}\n{text}\n\n" for i, text in enumerate(pair.prompts))
    if len(pair.prompts) == 1:
        return "<s>" + pair.prompts[0] + side[0]
    return f"<s>{prompts}" + "\n\n".join(f"### Response of agent {i}\n{text}" for i, text in enumerate(side))


def joint_texts(pairs):
    return [(joint_text(p, p.winner_completions), joint_text(p, p.loser_completions)) for p in pairs]


def fit(root, pairs, lora=None, callbacks=(), checkpoint=None, reward=None, data=None, trainer=None, **options):
    """One fit from pair files; returns the trainer and the module."""
    reward = reward or JointRewardModel("builtin:tiny", lora=lora)
    module = JointRewardModule(reward, **{"learning_rate": 1e-3, **options})
    logged = {"logger": CSVLogger(root, name="log"), "log_every_n_steps": 1}
    trainer = make_trainer(root, callbacks, **logged | (trainer or {}))
    datamodule = PreferenceDataModule(pairs=pairs, **(data or {}))
    trainer.fit(module, datamodule, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    return trainer, module


def literal_metrics(reward, pairs):
    """Loss, accuracy, margin and calibration error, pair by pair."""
    losses, correct, margins, bins = [], [], [], {}
    for pair in pairs:
        # A byte is a token: what is tokenised apart is so together.
        winner, loser = (reward.tokenizer(text.removeprefix("<s>"))["input_ids"] for text in joint_texts([pair])[0])
        with torch.no_grad():
            margin = (literal_score(reward, winner) - literal_score(reward, loser)).item()
        margins.append(margin)
        losses.append(math.log1p(math.exp(-margin)))
        correct.append(float(margin > 0))
        # Of the side whose ids come first: how probable it was said to be, and whether it won.
        probability = 1 / (1 + math.exp(-margin if winner < loser else margin))
        bins.setdefault(int(10 * probability), []).append(probability - float(winner < loser))
    found = {"loss": fmean(losses), "accuracy": fmean(correct), "margin": fmean(margins)}
    return {**found, "calibration_error": sum(abs(sum(some)) for some in bins.values()) / len(pairs)}


@pytest.mark.parametrize("val_fraction", [None, 0.3, 0])
def test_a_fit_logs_what_a_loop_over_pairs_finds_and_splits_by_item(tmp_path, val_fraction):
    pairs = make_pairs()
    path, seen = write_pairs(tmp_path / "pairs.json", pairs), Seen()
    data = {"batch_size": 3} if val_fraction is None else {"batch_size": 3, "val_fraction": val_fraction}
    trainer, module = fit(tmp_path, [path], callbacks=[seen], data=data, num_train_epochs=2)
    expected_items = {None: 1, 0.3: 3, 0: 0}[val_fraction]  # of 10
    train, held_out = held_out_split(pairs, 0.1 if val_fraction is None else val_fraction, 0)
    assert len({p.prompts[0] for p in held_out}) == expected_items
    assert len(held_out) == 2 * expected_items
    assert sorted(train + held_out, key=str) == sorted(pairs, key=str)
    assert not {p.prompts[0] for p in train} & {p.prompts[0] for p in held_out}
    assert sorted(seen.train) == sorted(joint_texts(train) * 2)  # each pair once an epoch
    assert sorted(seen.held_out) == sorted(joint_texts(held_out) * 2)
    assert seen.train[: len(train)] != seen.train[len(train) :]  # in another order
    rows = [row for row in read_csv(tmp_path) if row.get("reward/loss")]
    assert len(rows) == trainer.global_step == 2 * math.ceil(len(train) / 3)
    found = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("reward/val_")}
    if not expected_items:
        assert found == {}
        return
    expected = literal_metrics(module.reward_model, held_out)
    assert found == {f"reward/val_{name}": pytest.approx(value, abs=1e-5) for name, value in expected.items()}


def read_csv(root):
    return list(csv.DictReader(next(root.rglob("metrics.csv")).open()))


def test_whole_files_measured_before_the_first_update(tmp_path):
    pairs = make_pairs()
    path = write_pairs(tmp_path / "p.json", pairs)
    reward = JointRewardModel("builtin:tiny").load()
    expected = literal_metrics(reward, pairs)
    data = PreferenceDataModule(pairs=[path], batch_size=3)
    (found,) = make_trainer(tmp_path).validate(JointRewardModule(reward), data, verbose=False)
    assert found == {f"reward/val_{name}": pytest.approx(value, abs=1e-5) for name, value in expected.items()}
    fit(tmp_path, [path], data={"batch_size": 20, "val_fraction": 0})
    (row,) = [row for row in read_csv(tmp_path) if row.get("reward/loss")]
    for name in ("loss", "accuracy", "margin"):
        assert_close(float(row[f"reward/{name}"]), expected[name], 1e-5)


def test_a_split_needs_two_items():
    one = make_pairs(items=ITEMS[:1])
    assert held_out_split(one, 0.5, 0) == (one, [])
    assert held_out_split([], 0.5, 0) == ([], [])
    two = make_pairs(items=ITEMS[:2])
    assert all(len(side) == 2 for fraction in (0.01, 0.99) for side in held_out_split(two, fraction, 0))
    many = make_pairs(items=[f"{index}" for index in range(40)])
    splits = [held_out_split(many, 0.25, seed)[1] for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]
    assert len(splits[0]) == 20


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def test_all_forms_of_pair_files(tmp_path):
    def lines(name, *values):
        (tmp_path / name).write_text("".join(json.dumps(value) + "\n" for value in values))
        return str(tmp_path / name)

    user, blue, green = ([{"role": r, "content": c}] for r, c in zip("uaa", ("Sky?", "Blue", "Green"), strict=True))
    standard = {"prompt": "Sun?", "chosen": " Hot", "rejected": " Cold"}
    chat = {"prompt": user, "chosen": blue, "rejected": green}
    record = PreferencePair(["Sea?"], ["Wet"], ["Dry"], 1.0, 0.0, 0.5)
    paths = [
        write_pairs(tmp_path / "round.json", [record]),
        lines("records.jsonl", pair_to_record(record)),
        lines("standard.jsonl", standard, {"chosen": "a b", "rejected": "a c"}),
        lines("chat.jsonl", chat, {"chosen": user + blue, "rejected": user + green}),
    ]
    tokenizer, seen = tiny_tokenizer(), Seen()
    tokenizer.chat_template = CHAT
    reward = JointRewardModel("builtin:tiny", tokenizer=tokenizer)
    fit(tmp_path, paths, callbacks=[seen], reward=reward, data={"val_fraction": 0})
    talk = ("<s><u>Sky?\n<a>Blue\n", "<s><u>Sky?\n<a>Green\n")
    expected = [("<s>Sea?Wet", "<s>Sea?Dry")] * 2 + [("<s>Sun? Hot", "<s>Sun? Cold"), ("<s>a b", "<s>a c")]
    assert sorted(seen.train) == sorted([*expected, talk, talk])


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_fault_B36_half_precision_numbers_reach_the_log(tmp_path, precision):
    path, dtype = write_pairs(tmp_path / "p.json", make_pairs(1)), "float32" if "mixed" in precision else "bfloat16"
    reward = JointRewardModel("builtin:tiny", freeze_backbone=True, dtype=dtype).load()
    before = reward.head.weight.detach().clone()
    fit(tmp_path, [path], reward=reward, trainer={"precision": precision}, learning_rate=1e-5)
    assert (reward.head.weight != before).all()
    numbers = [float(value) for row in read_csv(tmp_path) for value in row.values() if value]
    assert len(numbers) > 20
    assert all(map(math.isfinite, numbers))


def test_the_packages_round_file_fits_and_its_export_loads_in_plain_transformers(tmp_path):
    reward = JointRewardModel("builtin:tiny", max_length=64)
    name = "package:pbrl_lightning.tasks.data/writing_pairs.json"
    with pytest.warns(UserWarning, match="was cut on the left to the 64"):
        trainer, _ = fit(tmp_path, [name], reward=reward, data={"batch_size": 8})
    assert trainer.global_step == 5  # one of 12 items is held out: 33 pairs
    directory = next(tmp_path.rglob("export/reward_model"))
    classifier = AutoModelForSequenceClassification.from_pretrained(directory)
    assert classifier.config.pad_token_id == 2
    (expected,) = reward.score_texts(["b"], ["c"], prompts=[["a"], ["e"]])
    (again,) = JointRewardModel(str(directory), max_length=64).load().score_texts(["b"], ["c"], prompts=[["a"], ["e"]])
    assert_close(again, expected, 1e-6)
    prefix, (response,) = reward.joint_tokens(["a", "e"], [["b", "c"]])
    assert_close(classifier(torch.tensor([prefix + response])).logits.item(), expected, 1e-4)


def test_counts_of_cut_texts_count_each_pair_once(tmp_path):
    reward = JointRewardModel("builtin:tiny", max_length=40)
    pairs = make_pairs()
    with pytest.warns(UserWarning, match="was cut"):
        fit(tmp_path, [write_pairs(tmp_path / "p.json", pairs)], reward=reward, num_train_epochs=3)
    assert reward.counts == {"truncated_joint_texts": len(pairs)}


# What goes wrong


def test_a_score_that_is_no_number_stops_before_the_weights_change(tmp_path):
    path = write_pairs(tmp_path / "p.json", make_pairs())
    reward = JointRewardModel("builtin:tiny").load()
    with torch.no_grad():
        reward.head.weight[0, 3] = math.nan
    before = [parameter.detach().clone() for parameter in reward.trained_parameters()]
    message = "the loss of batch 0 is nan; not finite: the winners' scores, the losers' scores"
    with pytest.raises(FloatingPointError, match=message):
        fit(tmp_path, [path], reward=reward)
    for parameter, value in zip(reward.trained_parameters(), before, strict=True):
        assert torch.equal(parameter.nan_to_num(), value.nan_to_num())


def test_files_that_cannot_be_fitted_are_refused_before_the_model_is_loaded(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text('{"iteration": 1, "num_pairs": 0, "pairs": []}')
    reward = JointRewardModel("builtin:tiny")
    with pytest.raises(ValueError, match=r"`pairs` must hold at least one pair, got none in .*empty"):
        fit(tmp_path, [str(empty)], reward=reward)
    with pytest.raises(FileNotFoundError):
        fit(tmp_path, [str(tmp_path / "absent.json")], reward=reward)
    with pytest.raises(ValueError, match=r"`val_fraction` must be in \[0, 1\), got 1"):
        PreferenceDataModule(pairs=[str(empty)], val_fraction=1)
    with pytest.raises(ValueError, match="`pairs` must be given to fit a JointRewardModule"):
        make_trainer(tmp_path).fit(JointRewardModule(reward), PreferenceDataModule([{"prompt": "a"}], len))
    assert not reward.is_loaded
    path = write_pairs(tmp_path / "p.json", make_pairs())
    for model, message in ((None, "the reward model needs `model`"), ("team", "`model: team` is for a MARLHFModule")):
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, [path], reward=JointRewardModel(model))


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_fault_B65_B79_B80_a_run_resumed_inside_an_epoch_ends_the_same(tmp_path, lora):
    path = write_pairs(tmp_path / "p.json", make_pairs(1))

    def run(name, checkpoint=None, stop=None, reward=None):
        options = {"every_n_train_steps": 1, "save_top_k": -1, "auto_insert_metric_name": False}
        saver = ModelCheckpoint(tmp_path / name / "c", filename="{step}", **options)
        callbacks = [saver, *([Killer(stop)] if stop else [])]
        reward = reward or JointRewardModel("builtin:tiny", lora=lora)
        options = {"data": {"batch_size": 2}, "num_train_epochs": 2, "trainer": {"enable_checkpointing": True}}
        with suppress(StopError):
            fit(tmp_path / name, [path], callbacks=callbacks, checkpoint=checkpoint, reward=reward, **options)
        return [parameter.detach().clone() for parameter in reward.trained_parameters()]

    whole = run("whole")
    for step in (2, 7):  # 9 pairs: 5 steps an epoch
        run(f"stopped_{step}", stop=step)
        path_of_step = tmp_path / f"stopped_{step}" / "c" / f"{step}.ckpt"
        resumed = run(f"stopped_{step}", checkpoint=str(path_of_step))
        assert all(torch.equal(one, other) for one, other in zip(resumed, whole, strict=True))
        names = set(torch.load(path_of_step, weights_only=True)["state_dict"])
        kept = {name for name in names if name != "reward_model.head.weight"}
        assert len(kept) == len(names) - 1 == len(whole) - 1
        assert all(name.startswith("reward_model.classifier.model.") for name in kept)
        assert all((".lora_" in name) == (lora is not None) for name in kept)
    checkpoint = torch.load(path_of_step, weights_only=True)
    del checkpoint["state_dict"]["reward_model.head.weight"]
    torch.save(checkpoint, path_of_step)
    with pytest.raises(
        KeyError, match=r"1 trained weights are missing from the checkpoint, such as 'reward_model\.head\.weight'"
    ):
        run("refused", checkpoint=str(path_of_step))


# Learning


def counted_pairs(count, seed, per_item=8):
    """The reward is how often both agents together write the letter a."""
    draw, pairs = random.Random(seed), []
    while len(pairs) < count * per_item:
        item = seed * 100 + len(pairs) // per_item
        sides = [["".join(draw.choice("aeiou") for _ in range(6)) for _ in range(2)] for _ in range(2)]
        winner, loser = sorted(sides, key=lambda side: -sum(text.count("a") for text in side))
        scores = [float(sum(text.count("a") for text in side)) for side in (winner, loser)]
        if scores[0] > scores[1]:
            pairs.append(PreferencePair([f"{item}?", f"{item}!"], winner, loser, *scores, sum(scores) / 2))
    return pairs


ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # a random one knows little


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "learning_rate"), [(None, 1e-3), (LoraOptions(target_modules=ADAPTED), 3e-3)], ids=["full", "lora"]
)
def test_a_known_reward_is_learned_for_items_never_seen(tmp_path, lora, learning_rate):
    path = write_pairs(tmp_path / "p.json", counted_pairs(32, seed=0))
    data = {"batch_size": 8, "val_fraction": 0.2}
    trainer, module = fit(tmp_path, [path], lora, data=data, learning_rate=learning_rate, num_train_epochs=4)
    assert trainer.callback_metrics["reward/val_accuracy"] >= 0.9
    assert trainer.callback_metrics["reward/val_loss"] < 0.4
    unseen = counted_pairs(10, seed=1)
    prompts = list(zip(*(pair.prompts for pair in unseen), strict=True))
    winner, loser = (
        module.reward_model.score_texts(*zip(*sides, strict=True), prompts=prompts)
        for sides in ([p.winner_completions for p in unseen], [p.loser_completions for p in unseen])
    )
    assert sum(one > other for one, other in zip(winner, loser, strict=True)) >= 0.9 * len(unseen)
