"""Held-out pairs of a MADPO run, and what is logged of each agent: by hand, and without a change of the weights."""

import math
from statistics import fmean

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import logsigmoid

from helpers import assert_close, pad_ids, tiny
from pbrl_lightning import (
    AgentTeam,
    JointRewardModel,
    JointRewardModule,
    MADPOModule,
    MARLHFModule,
    MARLModule,
    PreferenceDataModule,
    ReferenceKL,
)
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.callbacks import AgentExport, RoundFigures, RunReport
from pbrl_lightning.modules.gradients import clip_gradients, total_norm
from pbrl_lightning.pair_source import held_out_split
from pbrl_lightning.preferences.pair_tokens import PairLoader, tokenise_pair
from pbrl_lightning.preferences.round_files import write_round_file
from training_runs import make_data, make_module, make_team, make_trainer, same_weights, weights_of

ITEMS = "abcdefgh"
PAIRS = [
    PreferencePair([item, f"{item}?"], [f"{item}{n}!", "yes"], [f"{n}", "no" * (n + 1)], 1.0, 0.0, 0.25)
    for item in ITEMS
    for n in range(2)
]
HELD_OUT = [PreferencePair([item, f"{item}?"], ["x", f"y{item}"], [f"z{item}z", ""], 1.0, 0.0, 0.5) for item in "uvwxy"]
TEXTS = [{"prompt": letter, "chosen": f"{letter}!", "rejected": letter * 3} for letter in "abcdef"]


class Logged(CSVLogger):
    """Keeps everything that is logged."""

    def __init__(self, root):
        super().__init__(root)
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(dict(metrics))

    def values(self, name):
        return [row[name] for row in self.rows if name in row]

    def names(self):
        return {name for row in self.rows for name in row}


class NoExport(AgentExport):
    def on_fit_end(self, trainer, pl_module):
        """Takes time, and nothing here looks at it."""


class NoReport(RunReport):
    def on_fit_end(self, trainer, pl_module):
        """The same."""


class NoFigures(RoundFigures):
    def on_round_end(self, trainer, pl_module, round_number):
        """The same."""


class Batches(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(batch)


def quick_trainer(root, callbacks=(), **options):
    return make_trainer(root, [*callbacks, NoExport(), NoReport(), NoFigures()], **{"log_every_n_steps": 1, **options})


def run(root, module=None, callbacks=(), trainer=None, **data):
    module = module or make_module(num_train_epochs=2)
    logger = Logged(root)
    data = PreferenceDataModule(**{"batch_size": 3, **data})
    made = quick_trainer(root, callbacks, logger=logger, **(trainer or {}))
    made.fit(module, data)
    return module, data, logger, made


def scores(module, pairs):
    """Log-probabilities of one pair at a time: ``(N, 2)`` each."""
    team, found = module.team, []
    for pair in pairs:
        (batch,) = PairLoader(pad_ids(team), [pair], [tokenise_pair(team, pair)], 1, 0)
        with torch.no_grad():
            found.append(torch.stack([team.response_logps(i, batch.agents[i], False) for i in range(team.num_agents)]))
    return found


def by_hand(module, pairs):
    """Loss, accuracy and margin of a list of pairs."""
    margins = [(logps[:, 0] - logps[:, 1]).sum() for logps in scores(module, pairs)]
    return (
        fmean(-logsigmoid(module.dpo_beta * margin).item() for margin in margins),
        fmean(float(margin > 0) for margin in margins),
        fmean(margin.item() for margin in margins),
    )


# -- held-out pairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eval_pairs", "val_fraction"])
def test_held_out_loss_accuracy_and_margin_are_those_of_a_loop_over_pairs(tmp_path, how):
    given = {"eval_pairs": HELD_OUT} if how == "eval_pairs" else {"val_fraction": 0.25}
    module, data, logger, trainer = run(tmp_path, pairs=PAIRS, **given)
    training, held_out = (PAIRS, HELD_OUT) if how == "eval_pairs" else held_out_split(PAIRS, 0.25, 0)
    assert data.training_pairs == training
    if how == "val_fraction":
        assert len(held_out) == 4  # whole task items
        assert not {tuple(pair.prompts) for pair in training} & {tuple(pair.prompts) for pair in held_out}
    loss, accuracy, margin = by_hand(module, held_out)
    expected = {"val/loss": loss, "val/preference_accuracy": accuracy, "val/margin": margin}
    for name, value in expected.items():
        assert len(logger.values(name)) == 2  # after each epoch
        assert_close(logger.values(name)[-1], value, 1e-5)
        assert_close(trainer.callback_metrics[name].item(), value, 1e-5)
    assert logger.values("val/loss")[0] != logger.values("val/loss")[1]


def test_held_out_pairs_change_no_weight(tmp_path):
    plain, _, logger, _ = run(tmp_path / "0", pairs=PAIRS)
    assert not [name for name in logger.names() if name.startswith("val/")]
    watched, _, _, _ = run(
        tmp_path / "1", pairs=PAIRS, eval_pairs=HELD_OUT, trainer={"val_check_interval": 2, "num_sanity_val_steps": 2}
    )
    assert same_weights(weights_of(plain.team), weights_of(watched.team))
    split, _, _, _ = run(tmp_path / "2", pairs=PAIRS, val_fraction=0.25)
    kept, _ = held_out_split(PAIRS, 0.25, 0)
    alone, _, _, _ = run(tmp_path / "3", pairs=kept)
    assert same_weights(weights_of(split.team), weights_of(alone.team))
    assert not same_weights(weights_of(plain.team), weights_of(split.team))


@pytest.mark.parametrize("iterative", [True, False])
def test_a_run_that_collects_measures_given_pairs_and_changes_no_weight(tmp_path, iterative):
    weights, values = [], []
    for number, given in enumerate(({}, {"eval_pairs": HELD_OUT})):
        logger = Logged(tmp_path / str(number))
        module = make_module(rounds=2 if iterative else None, num_train_epochs=1)
        trainer = quick_trainer(tmp_path / str(number), logger=logger)
        trainer.fit(module, make_data(iterative=iterative, **given))
        weights.append(weights_of(module.team))
        values.append(logger.values("val/preference_accuracy"))
        assert logger.values("eval/turn_1/reward_mean")  # as without held-out pairs
    assert same_weights(*weights)
    assert [len(found) for found in values] == [0, 2 if iterative else 1]


def test_a_checkpoint_is_kept_by_the_held_out_loss(tmp_path):
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="val/loss", filename="best")
    module = make_module(num_train_epochs=3)
    _, _, logger, _ = run(
        tmp_path, module, [best], trainer={"enable_checkpointing": True}, pairs=PAIRS, eval_pairs=HELD_OUT
    )
    assert best.best_model_score.item() == pytest.approx(min(logger.values("val/loss")))


def test_validate_measures_pairs_and_evaluates_items(tmp_path):
    module = make_module(make_team(dtype="float64"))
    data = make_data(iterative=False, eval_pairs=HELD_OUT)
    (found,) = _merged(make_trainer(tmp_path).validate(module, data, verbose=False))
    loss, accuracy, margin = by_hand(module, HELD_OUT)
    assert_close(found["val/loss"], loss, 1e-5)
    assert (found["val/preference_accuracy"], found["eval/n"]) == (pytest.approx(accuracy), 5.0)
    assert_close(found["val/margin"], margin, 1e-5)
    (found,) = _merged(make_trainer(tmp_path).validate(module, PreferenceDataModule(pairs=PAIRS), verbose=False))
    assert_close(found["val/margin"], by_hand(module, PAIRS)[2], 1e-5)
    run(tmp_path, module, pairs=PAIRS, eval_pairs=HELD_OUT, trainer={"max_steps": 1})  # a fit after a validation
    with pytest.raises(ValueError, match="`eval_items` and `reward_func`, or `eval_pairs`, must be given to validate"):
        make_trainer(tmp_path).validate(module, make_data(iterative=False, eval_items=None), verbose=False)


def _merged(results):
    """Lightning lists results by loader, those of the end with each."""
    return [{name: value for found in results for name, value in found.items()}]


def test_a_reward_model_takes_eval_pairs_and_then_fits_on_all_pairs(tmp_path):
    module = JointRewardModule(JointRewardModel("builtin:tiny"))
    module, data, logger, _ = run(tmp_path, module, pairs=PAIRS, eval_pairs=HELD_OUT)
    assert data.training_pairs == PAIRS
    model = module.reward_model
    sides = [
        model.score_texts(
            *([getattr(pair, side)[agent] for pair in HELD_OUT] for agent in range(2)),
            prompts=[[pair.prompts[agent] for pair in HELD_OUT] for agent in range(2)],
        )
        for side in ("winner_completions", "loser_completions")
    ]
    margins = [winner - loser for winner, loser in zip(*sides, strict=True)]
    assert_close(logger.values("reward/val_margin")[-1], fmean(margins), 1e-4)
    assert logger.values("reward/val_accuracy")[-1] == pytest.approx(fmean(float(margin > 0) for margin in margins))


def test_what_cannot_be_held_out_is_said(tmp_path):
    team = make_team()
    for module, data, message in (
        (make_module(team), {"pairs": PAIRS, "eval_pairs": HELD_OUT, "val_fraction": 0.1}, "exclude each other"),
        (
            make_module(team),
            {"items": [{"prompt": "a"}], "reward_func": len, "val_fraction": 0.1},
            "takes `eval_pairs`",
        ),
        (
            MARLModule(team),
            {"items": [{"prompt": "a"}], "reward_func": len, "eval_pairs": HELD_OUT},
            "a MARLModule takes",
        ),
        (
            MARLHFModule(team),
            {"items": [{"prompt": "a"}], "reward_func": len, "val_fraction": 0.1},
            "`val_fraction` is for a MADPOModule or JointRewardModule",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path).fit(module, PreferenceDataModule(**data))
    assert not team.is_loaded


def test_items_on_both_sides_and_a_split_of_one_item_are_warned_of(tmp_path):
    short = {"max_steps": 1}
    with pytest.warns(UserWarning, match="2 of the 7 `eval_pairs` have the prompts of pairs that are trained on"):
        run(tmp_path / "0", pairs=PAIRS, eval_pairs=HELD_OUT + PAIRS[:2], trainer=short)
    texts = [{"chosen": f"{letter}!", "rejected": letter} for letter in "abcd"]
    module = make_module(make_team(num_agents=1))
    with pytest.warns(
        UserWarning, match="all `pairs` have the same prompts, .* so none is held out; give `eval_pairs`"
    ):
        _, data, _, _ = run(tmp_path / "1", module, pairs=texts, val_fraction=0.5, trainer=short)
    assert len(data.training_pairs) == 4


# -- numbers of each agent -----------------------------------------------------------------------------------------


def test_each_agents_numbers_are_those_of_a_loop_over_pairs(tmp_path):
    team = AgentTeam([tiny("llama"), tiny("gpt2")], tokenizers=tiny_tokenizer())
    module = MADPOModule(team, learning_rate=1e-3, num_train_epochs=1)
    expected = {}
    team.load()
    logps = torch.stack(scores(module, PAIRS)).mean(0)  # (N, 2)
    lengths = [[fmean(len(side[agent].encode()) for side in sides) for sides in _sides(PAIRS)] for agent in range(2)]
    for agent in range(2):
        for column, side in enumerate(("chosen", "rejected")):
            expected[f"train/logps/{side}/agent_{agent}"] = logps[agent, column].item()
            expected[f"train/response_length/{side}/agent_{agent}"] = lengths[agent][column]
        expected[f"train/margin/agent_{agent}"] = (logps[agent, 0] - logps[agent, 1]).item()
    for column, side in enumerate(("chosen", "rejected")):
        expected[f"train/logps/{side}"] = logps[:, column].sum().item()
        expected[f"train/response_length/{side}"] = fmean(length[column] for length in lengths)
    _, _, logger, _ = run(tmp_path, module, pairs=PAIRS, batch_size=len(PAIRS))
    for name, value in expected.items():
        assert_close(logger.values(name)[0], value, 1e-5)
    assert_close(
        logger.values("train/margin")[0], expected["train/margin/agent_0"] + expected["train/margin/agent_1"], 1e-5
    )
    assert logger.values("turn_1/reward_mean") == [0.25]


def _sides(pairs):
    return [[pair.winner_completions for pair in pairs], [pair.loser_completions for pair in pairs]]


class Gradients(Callback):
    """Each agent's gradient norm before the clipping, and the largest after it, in plain Python."""

    def __init__(self):
        self.norms, self.clipped = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append([_norm(group["params"]) for group in optimizer.param_groups])


def _norm(parameters):
    return math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in parameters if p.grad is not None))


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.01}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}]
)
def test_gradient_norms_are_those_before_clipping(tmp_path, clip):
    seen = Gradients()
    trainer = {"accumulate_grad_batches": 2, **clip}
    _, _, logger, _ = run(tmp_path, callbacks=[seen], pairs=PAIRS, trainer=trainer)
    assert len(seen.norms) == 6  # 16 pairs in 6 batches, 2 of them per step, 2 epochs
    for agent in range(2):
        assert_close(
            torch.tensor(logger.values(f"train/grad_norm/agent_{agent}")),
            torch.tensor([norms[agent] for norms in seen.norms]),
            1e-4,
        )
    assert_close(
        torch.tensor(logger.values("train/grad_norm")), torch.tensor([math.hypot(*norms) for norms in seen.norms]), 1e-4
    )
    assert min(map(min, seen.norms)) > 0.02  # so that the clipping shrinks it


def test_details_are_taken_on_the_steps_that_are_written_and_change_no_weight(tmp_path):
    weights, taken = [], []
    for every in (1, 4):
        monitored = Monitored()
        module, _, logger, _ = run(
            tmp_path / str(every), callbacks=[monitored], pairs=PAIRS, trainer={"log_every_n_steps": every}
        )
        weights.append(weights_of(module.team))
        taken.append(monitored.norms)
        assert len(logger.values("train/grad_norm/agent_1")) == len(logger.values("train/loss")) == 12 // every
        assert len(logger.values("train/logps/chosen/agent_1")) == 12 // every
    assert same_weights(*weights)
    # Six steps an epoch: the first of each, and the fourth, eighth and twelfth.
    places = [0, 0, 0, 3, 3, 3, 6, 7, 7, 7, 7, 11]
    assert taken[1] == [taken[0][place] for place in places]


class Monitored(Callback):
    """What a callback sees of the gradient's norm after each step."""

    def __init__(self):
        self.norms = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.norms.append(trainer.callback_metrics["train/grad_norm"].item())


def test_a_gradient_is_clipped_as_by_torch_and_measured_before():
    def parameters():
        made = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1, 3)]
        made[0].grad, made[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([-4.0])
        return made

    for limit, algorithm, expected in (
        (1.0, "norm", [0.6, 0.0, -0.8]),
        (1.0, "value", [1.0, 0.0, -1.0]),
        (None, None, [3.0, 0.0, -4.0]),
    ):
        group = parameters()
        assert clip_gradients(group, limit, algorithm).item() == 5.0
        assert_close(torch.cat([group[0].grad, group[1].grad]), torch.tensor(expected), 1e-5)
        assert group[2].grad is None
    assert clip_gradients(parameters()[2:], 1.0, None) is None
    assert total_norm([torch.tensor(3.0), torch.tensor(4.0)]).item() == 5.0


def test_pairs_without_rewards_log_none(tmp_path):
    _, _, logger, _ = run(tmp_path / "0", make_module(make_team(num_agents=1)), pairs=TEXTS, trainer={"max_steps": 2})
    assert "train/loss" in logger.names()
    assert not [name for name in logger.names() if name.startswith("turn_1/")]
    write_round_file(tmp_path / "scored.json", 1, [PreferencePair(["a"], ["a!"], ["b"], 1.0, 0.0, 0.75)])
    mixed = [TEXTS[0], PreferencePair(["a"], ["a!"], ["b"], 1.0, 0.0, 0.75)]
    for pairs in (str(tmp_path / "scored.json"), mixed):
        _, _, logger, _ = run(
            tmp_path / "1", make_module(make_team(num_agents=1)), pairs=pairs, trainer={"max_steps": 1}
        )
        assert logger.values("turn_1/reward_mean") == logger.values("turn_1/expected_return") == [0.75]


def test_a_policy_phase_logs_each_agents_numbers(tmp_path):
    module = MARLModule(make_team(), learning_rate=1e-3, num_train_epochs=1, reference_kl=ReferenceKL(0.1))
    logger, seen = Logged(tmp_path), Batches()
    trainer = quick_trainer(tmp_path, [seen], logger=logger)
    trainer.fit(module, make_data(iterative=False, num_candidates=None))
    assert len(seen.seen) == 2
    for number, batch in enumerate(seen.seen):
        lengths = [rows.response_mask.sum(1).float().mean().item() for rows in batch.agents]
        for agent in range(2):
            assert logger.values(f"policy/response_length/agent_{agent}")[number] == pytest.approx(lengths[agent])
        assert logger.values("policy/response_length")[number] == pytest.approx(fmean(lengths))
        logps = [logger.values(f"policy/logp/agent_{agent}")[number] for agent in range(2)]
        assert logger.values("policy/logp")[number] == pytest.approx(fmean(logps))
        assert logps[0] != logps[1]
        kls = [logger.values(f"policy/kl/agent_{agent}")[number] for agent in range(2)]
        assert logger.values("policy/kl")[number] == pytest.approx(fmean(kls))
        rewards = (batch.rewards - batch.returns) / 0.1
        assert kls == pytest.approx(rewards.mean(1).tolist(), abs=1e-9)
    assert max(logger.values("policy/kl/agent_0")) > 0
