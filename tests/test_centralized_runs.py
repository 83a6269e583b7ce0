"""Centralised teams: one actor writes the joint response of all roles, in every run, and roles are told apart late."""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_roles import ROLES, Cut, Scripted
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from fake_api import FakeApi
from helpers import assert_close
from pbrl_lightning import AgentTeam, ApiEndpoint, JointAdapter, JointRewardModel, PreferenceDataModule, TagAdapter
from pbrl_lightning.batches import PairBatch, RolloutBatch
from pbrl_lightning.callbacks import JointEvaluation
from pbrl_lightning.comparators.api import ApiComparator
from pbrl_lightning.comparators.base import CollectionPhase
from pbrl_lightning.comparators.local import CurrentComparator, ModelComparator
from pbrl_lightning.modules.madpo import MADPOModule
from pbrl_lightning.modules.marl import MARLModule
from pbrl_lightning.modules.marlhf import MARLHFModule
from pbrl_lightning.preferences.pair_tokens import collate_rows
from pbrl_lightning.tasks.coordination import eval_items, train_items
from training_runs import (
    EVAL_ITEMS,
    ITEMS,
    SAMPLING,
    Killer,
    Recorder,
    StopError,
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

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FEW = {"num_train_epochs": 1, "num_generations": 4, "learning_rate": 1e-3}
CENTRAL = {"num_agents": 2, "collaboration": "centralized"}


class Heard(JointRewardModel):
    """Remembers the texts that it scored, and what it said."""

    def __init__(self):
        super().__init__("builtin:tiny")
        self.calls = []

    def score_texts(self, *completions, prompts):
        self.calls.append((completions, prompts, super().score_texts(*completions, prompts=prompts)))
        return self.calls[-1][-1]


def make_marlhf(team, rounds=None):
    options = {"num_iterations": rounds, "num_reward_epochs": 1, "reward_learning_rate": 1e-3, **FEW}
    return MARLHFModule(team, reward_model=Heard(), **options)


MODULES = {
    "madpo": partial(make_module, num_train_epochs=2),
    "madpo_iter": partial(make_module, rounds=2),
    "marlhf": make_marlhf,
    "marlhf_iter": partial(make_marlhf, rounds=2),
    "marl": partial(MARLModule, **FEW),
}
ALL = pytest.mark.parametrize("kind", MODULES)


class Remembering:
    """A reward that keeps what it was called with, row by row: letter, prompts by role, responses by role."""

    def __init__(self):
        self.rows = []

    def __call__(self, *completions, prompts, batch_items):
        rows = zip(batch_items, zip(*prompts, strict=True), zip(*completions, strict=True), strict=True)
        self.rows += [(item["prompt"], asked, said) for item, asked, said in rows]
        return text_reward(*completions)


class RememberingMetrics(Remembering):
    def __call__(self, *completions, prompts, batch_items):
        return {"highest": max(super().__call__(*completions, prompts=prompts, batch_items=batch_items))}


class Batches(Recorder):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)


def central_team(**options):
    return make_team(**{**CENTRAL, "formatters": ROLES, "joint_adapter": Cut(), **options})


def fit(root, kind, callbacks=(), checkpoint=None, trainer=None, **options):
    team, reward, metrics, seen = central_team(), Remembering(), RememberingMetrics(), Batches()
    module = MODULES[kind](team)
    options = {"num_candidates": 6, "eval_metrics": metrics, **options}
    data = make_data(reward, iterative=kind.endswith("iter"), **options)
    trainer = make_trainer(root, [seen, *callbacks], **{"max_epochs": None, **(trainer or {})})
    with suppress(StopError):
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    own = {"team": team, "module": module, "data": data, "reward": reward, "metrics": metrics, "root": root}
    return SimpleNamespace(**own, trainer=trainer, batches=seen.batches, pairs=pairs_of(root / "replay"))


def pairs_of(directory):
    return [pair for file in round_files(directory).values() for pair in file["pairs"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of each kind, made when asked for."""
    runs = {}

    def made(kind):
        if kind not in runs:
            runs[kind] = fit(tmp_path_factory.mktemp(kind), kind)
        return runs[kind]

    return made


def joint(letter):
    return f"{letter}? one {letter}/two {letter}"


def by_role(letter):
    return (f"one {letter}", f"two {letter}")


def roles_of(text):
    return tuple(Cut().parse(text, 2) or ["", ""])


def score(text):
    return text_reward(*[[part] for part in roles_of(text)])[0]


def texts_of(team, rows):
    """Prompts and responses of a batch's rows, as texts."""
    found = ([], [])
    for ids, real, response in zip(rows.input_ids, rows.attention_mask, rows.response_mask, strict=True):
        for texts, part in zip(found, (ids[real & ~response], ids[response]), strict=True):
            texts.append(team.tokenizer(0).decode(part, skip_special_tokens=True))
    return found


@ALL
def test_every_run_trains_one_actor_and_exports_it(kind, run):
    done = run(kind)
    assert done.trainer.state.finished
    assert len(done.data.rounds) == {"marl": 0, "madpo_iter": 2, "marlhf_iter": 2}.get(kind, 1)
    reward = ["reward"] if "marlhf" in kind else []
    assert [group["name"] for group in done.trainer.optimizers[0].param_groups] == ["agent_0", *reward]
    assert {path.name for path in (done.root / "export").iterdir()} == {"agent_0", *(f"{r}_model" for r in reward)}
    assert not same_weights(weights_of(central_team().load()), weights_of(done.team))
    saved = dict(AutoModelForCausalLM.from_pretrained(done.root / "export" / "agent_0").named_parameters())
    assert all(torch.equal(value, saved[name]) for name, value in done.team.agent_parameters(0).items())
    assert all(len(batch.agents) == 1 for batch in done.batches)


@ALL
def test_the_task_reward_is_shown_every_role_with_its_own_prompt(kind, run):
    rows = run(kind).reward.rows
    assert {(letter, asked) for letter, asked, _ in rows} == {(p, by_role(p)) for p in "abcvwxy"}
    assert {(bool(first), bool(second)) for _, _, (first, second) in rows} == {(0, 0), (1, 0), (1, 1)}


@ALL
def test_records_have_one_entry_of_joint_texts(kind, run):
    pairs = run(kind).pairs
    assert (len(pairs) > 0) == (kind != "marl")
    for pair in pairs:
        assert pair["prompts"] in [[joint(letter)] for letter in "abc"]
        (winner,), (loser,) = pair["winner_completions"], pair["loser_completions"]
        assert pair["winner_reward"] == score(winner) > score(loser) == pair["loser_reward"]


def test_joint_texts_are_kept_with_their_tags(tmp_path):
    team, text = make_team(formatters=ROLES, collaboration="centralized"), "<agent_0>a</agent_0> <AGENT_1> b\n"
    comparator = Scripted({index: {0: text, 1: "untagged"} for index in range(3)})
    make_trainer(tmp_path).fit(make_module(team, rounds=1), make_data(comparator=comparator, eval_items=None))
    asked = [TagAdapter().build({}, by_role(letter)) for letter in "abc"]
    assert comparator.asked == [(0, prompt) for prompt in asked]
    pairs = pairs_of(tmp_path / "replay")
    assert [pair["prompts"] for pair in pairs] == [[prompt] for prompt in asked]
    for pair in pairs:  # the actor has learned no tags yet: both of its roles are empty
        scores = {pair[f"{side}_completions"][0]: pair[f"{side}_reward"] for side in ("winner", "loser")}
        assert scores.pop(text) == text_reward(["a"], ["b"])[0]
        assert list(scores.values()) == text_reward([""], [""])
    assert team.counts["untagged_comparator_responses"] == team.counts["untagged_responses"] == 3


@ALL
def test_what_is_learned_from_are_joint_texts(kind, run):
    done, learned, rollouts = run(kind), run(kind).module.learned_reward, 0
    sides = {side for p in done.pairs for side in (p["winner_completions"][0], p["loser_completions"][0])}
    for batch in done.batches:
        prompts, texts = texts_of(done.team, batch.agents[0])
        assert set(prompts) <= set(map(joint, "abc"))
        if isinstance(batch, PairBatch):  # in a MARLHF run the reward model's, whose tokenizer is the same
            assert set(texts) <= sides
            continue
        expected = list(map(score, texts))
        if learned is not None:
            said, asked, expected = learned.calls[rollouts]
            assert (said, asked) == ((texts,), [prompts])
        rollouts += isinstance(batch, RolloutBatch)
        assert batch.advantages.shape == (1, len(texts))
        assert_close(batch.rewards, torch.tensor(expected, dtype=torch.float64))
    assert rollouts == {"marlhf_iter": 4, "marlhf": 2, "marl": 2}.get(kind, 0)
    assert (len(done.batches) > rollouts) == (kind != "marl")


@pytest.mark.parametrize("iterative", [False, True])
def test_an_actors_text_without_tags_stays_and_a_comparators_is_dropped(iterative, tmp_path):
    options = {"num_candidates": 8, "eval_items": None, "pair_selection": "all", "pairs_per_sample": None}
    options |= {"trainer": {"max_steps": 1}, "eval_metrics": None}
    done = fit(tmp_path, "madpo_iter" if iterative else "madpo", **options)
    sides = []
    for stream in ("actors", "comparator"):
        drawn = {"num_candidates": 8, "sampling": SAMPLING, "seed": 0, "stream": stream, "step": 1}
        samples = central_team().sample(ITEMS, [0, 1, 2], **drawn)
        sides.append([[sample.responses[0][k].text for k in range(8)] for sample in samples])
    pairs, rows, means, untagged, dropped = [], [], [], 0, 0
    for letter, mine, theirs in zip("abc", *sides, strict=True):
        kept = [k for k in range(8) if not iterative or Cut().parse(theirs[k], 2) is not None]
        dropped += 8 - len(kept)
        untagged += sum(Cut().parse(mine[k], 2) is None for k in kept)
        compared = [mine[k] for k in kept] + ([theirs[k] for k in kept] if iterative else [])
        rows += [(letter, by_role(letter), roles_of(text)) for text in compared]
        duels = [(mine[k], theirs[k]) for k in kept]
        if not iterative:
            duels = [(mine[i], mine[k]) for i in range(8) for k in range(i + 1, 8)]
        for first, second in duels:
            if score(first) != score(second):
                pairs.append((first, second) if score(first) > score(second) else (second, first))
                means.append(sum(map(score, compared)) / len(compared))
    found = [(pair["winner_completions"][0], pair["loser_completions"][0]) for pair in done.pairs]
    assert sorted(found) == sorted(pairs)
    assert sorted(pair["candidate_reward_mean"] for pair in done.pairs) == pytest.approx(sorted(means))
    assert sorted(done.reward.rows) == sorted(rows)
    counted = [done.team.counts.get(f"untagged_{side}responses", 0) for side in ("", "comparator_")]
    assert counted == [untagged, dropped]
    assert untagged > 0
    assert (dropped > 0) == iterative
    assert any(roles_of(text) == ("", "") for pair in found for text in pair)


@ALL
def test_evaluation_tells_roles_apart(kind, run):
    done = run(kind)
    assert {(letter, asked) for letter, asked, _ in done.metrics.rows} == {(p, by_role(p)) for p in "vwxy"}
    options = {"num_candidates": 1, "sampling": SAMPLING, "seed": 0, "stream": "evaluation"}
    texts = [sample.responses[0][0].text for sample in done.team.sample(EVAL_ITEMS[:4], [0, 1, 2, 3], **options)]
    assert [said for _, _, said in done.metrics.rows[-4:]] == [roles_of(text) for text in texts]
    (evaluation,) = (c for c in done.trainer.callbacks if isinstance(c, JointEvaluation))
    assert evaluation.results[-1][1] == pytest.approx(sum(map(score, texts)) / 4)


def test_validation_tells_roles_apart(tmp_path):
    metrics = RememberingMetrics()
    data = make_data(iterative=False, eval_metrics=metrics)
    (logged,) = make_trainer(tmp_path).validate(make_module(central_team()), data, verbose=False)
    assert [row[:2] for row in metrics.rows] == [(letter, by_role(letter)) for letter in "vwxyz"]
    expected = sum(text_reward(*[[part] for part in said])[0] for _, _, said in metrics.rows) / 5
    assert logged["eval/turn_1/reward_mean"] == pytest.approx(expected)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_madpo_scores_the_whole_joint_response(lora):
    team = perturb(central_team(lora=lora, dtype="float64").load(), 3)
    prompts, winners, losers = [[0, 10, 11], [0, 20]], [[70, 71, 1], [80]], [[90, 91], [81, 82, 83, 1]]
    batch = PairBatch([collate_rows(prompts * 2, winners + losers, 1)], torch.ones(2), 0.5, torch.zeros(2))
    loss, _ = MADPOModule(team, dpo_beta=0.3).step(batch, "batch 0")

    def logp(prompt, response):
        with team.active(0):
            logits = team.model(0)(input_ids=torch.tensor([prompt + response])).logits[0]
        steps = enumerate(response, start=len(prompt) - 1)
        return sum(torch.log_softmax(logits[column], 0)[token] for column, token in steps)

    margins = [logp(p, w) - logp(p, y) for p, w, y in zip(prompts, winners, losers, strict=True)]
    assert_close(loss, -sum(logsigmoid(0.3 * margin) for margin in margins) / 2)
    # A decentralised scorer leaves the last token out, which is another loss.
    alone = perturb(make_team(lora, "float64", num_agents=1).load(), 3)
    assert same_weights(weights_of(alone), weights_of(team))
    assert abs(MADPOModule(alone, dpo_beta=0.3).step(batch, "batch 0")[0] - loss) > 1e-2


class Letters(JointAdapter):
    """Each printable ASCII character of a joint text is one role's response."""

    def build(self, item, prompts):
        return "".join(prompts)

    def parse(self, text, num_roles):
        kept = [letter for letter in text if letter.isascii() and letter.isprintable()]
        return [*kept, *[""] * num_roles][:num_roles] if kept else None


def both_lower(*completions):
    return [float(all(text.islower() for text in texts)) for texts in zip(*completions, strict=True)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("kind", ["madpo_iter", "marl"])
def test_a_centralised_team_learns(kind, seed, tmp_path):
    team = perturb(make_team(**CENTRAL, joint_adapter=Letters()).load(), seed, 0.02)
    with torch.no_grad():  # printable ASCII at first: other bytes make texts that are not what was sampled
        head = team.model(0).get_output_embeddings().weight
        head[:3], head[97:] = 0, 0
    iterative = kind == "madpo_iter"
    module = make_module(team, rounds=4) if iterative else MARLModule(team, **{**FEW, "num_train_epochs": 5})
    options = {"eval_items": eval_items(), "comparator": CurrentComparator() if iterative else None}
    data = PreferenceDataModule(train_items(), both_lower, sampling=SAMPLING, seed=seed, **options)

    def success():
        return data.evaluator.evaluate(team, list(range(8)), num_responses=16).rewards.mean().item()

    before = success()
    make_trainer(tmp_path).fit(module, data)
    assert before < 0.4
    assert success() >= 0.9


@ALL
def test_the_same_seed_gives_the_same_run(kind, run, tmp_path):
    again = fit(tmp_path, kind)
    assert same_weights(weights_of(again.team), weights_of(run(kind).team))
    assert (again.pairs, again.reward.rows) == (run(kind).pairs, run(kind).reward.rows)


RESUMED = [("madpo", "3"), ("madpo_iter", "4"), ("madpo_iter", "round_0002"), ("marlhf_iter", "round_0002")]


@pytest.mark.parametrize(
    ("kind", "checkpoint"),
    [
        *RESUMED,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("marlhf", "28"), ("marlhf_iter", "5"), ("marl", "1"))
        ),
    ],
)
def test_a_resumed_run_ends_as_one_that_never_stopped(kind, checkpoint, run, tmp_path):
    whole = run(kind)
    options = {"every_n_train_steps": 1, "save_top_k": -1, "auto_insert_metric_name": False}
    saver = ModelCheckpoint(tmp_path / "checkpoints", "{step}", **options)
    killer = Killer(int(checkpoint) if checkpoint.isdigit() else whole.trainer.global_step - 1)
    killed = fit(tmp_path, kind, [killer, saver], trainer={"enable_checkpointing": True})
    assert 0 < killed.trainer.global_step < whole.trainer.global_step
    resumed = fit(tmp_path, kind, checkpoint=str(tmp_path / "checkpoints" / f"{checkpoint}.ckpt"))
    assert same_weights(weights_of(resumed.team), weights_of(whole.team))
    assert (resumed.pairs, resumed.trainer.global_step) == (whole.pairs, whole.trainer.global_step)


WRONG = {
    "a word": ({"collaboration": "central"}, "must be 'decentralized' or 'centralized', got 'central'"),
    "an adapter": ({"collaboration": "decentralized", "joint_adapter": Cut()}, "`joint_adapter` is for .*centralized"),
    "no count": ({"num_agents": None}, "`num_agents` must be the number of roles in a centralised team, got None"),
    "count 0": ({"num_agents": 0}, "`num_agents` must be the number of roles in a centralised team, got 0"),
    "models": ({"models": ["builtin:tiny"] * 2}, "`models` must be one model in a centralised team, got 2"),
    "both": ({"models": ["builtin:tiny"] * 2, "num_agents": None}, r"`num_agents` must .*; `models` must be one model"),
    "formatters": ({"formatters": ["{prompt}"] * 3}, r"`formatters` must be one for all or one per .*2 .*, got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_of_a_team_are_named(name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        AgentTeam(**{"models": "builtin:tiny", **CENTRAL, **options})


def test_an_export_of_one_agent_is_a_centralised_team_again_and_one_of_two_is_not(run, tmp_path):
    again = AgentTeam(str(run("madpo").root / "export"), **CENTRAL).load()
    assert same_weights(weights_of(again), weights_of(run("madpo").team))
    make_team().save(tmp_path)
    with pytest.raises(ValueError, match="`models` must be one model in a centralised team, got 2"):
        AgentTeam(str(tmp_path), **CENTRAL)


@pytest.mark.parametrize("remote", [False, True], ids=["model", "api"])
@pytest.mark.parametrize("own", [["X {prompt}", "Y {prompt}"], "X {prompt}"], ids=["each", "one"])
def test_a_comparators_own_formatters_count_in_a_centralised_team(remote, own):
    with FakeApi() as api:
        given = (ApiComparator, ApiEndpoint(api.url_of("generic"))) if remote else (ModelComparator, "builtin:tiny")
        comparator, team = given[0](given[1], formatters=own), central_team().load()
        comparator.check(team)
        with comparator.open(team, CollectionPhase(1)) as speaker:
            options = {"num_candidates": 1, "sampling": SAMPLING, "seed": 0, "stream": "comparator", "step": 1}
            (sample,) = speaker.sample(ITEMS[:1], [0], **options)
    assert sample.prompts == ["a? X a/X a" if isinstance(own, str) else "a? X a/Y a"]
