"""Rollouts as data: when they are sampled, what they are made of, ranks, resume, and what a run logs and clips."""

import io
import math
from contextlib import suppress

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from test_marl import (
    DROPPED,
    SAMPLING,
    G,
    Notes,
    assert_same_gradients,
    listen,
    reward,
    rollouts,
    speaking_team,
    step_gradients,
)

from pbrl_lightning import AttachedCritics, JointCritic, MARLModule, PreferenceDataModule, ReferenceKL
from pbrl_lightning import rollouts as rollouts_module
from pbrl_lightning.callbacks import JointEvaluation
from training_runs import (
    EVAL_ITEMS,
    CountingReward,
    make_data,
    make_team,
    make_trainer,
    same_weights,
    text_reward,
    weights_of,
)

CRITICS = {"maac": lambda: JointCritic(dtype="float64"), "iac": AttachedCritics}
FIVE = [{"prompt": text} for text in ("ab", "c", "defg", "hi", "jkl")]


def fit(root, module=None, items=FIVE[:3], score=text_reward, data=None, callbacks=(), checkpoint=None, **options):
    """A short run; its module."""
    module = module or MARLModule(make_team(), learning_rate=1e-2, num_train_epochs=2)
    data = PreferenceDataModule(items, score, sampling=SAMPLING, **{"eval_items": EVAL_ITEMS, **(data or {})})
    trainer = make_trainer(root, callbacks, **options)
    with suppress(StopError):
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return module


class Diary(Callback):
    """When rollouts are sampled and when batches are trained on, with which weights."""

    def __init__(self, team):
        self.team, self.trainer, self.events, self.said = team, None, [], {}
        sample = team.sample

        def spy(items, indices, **options):
            samples = sample(items, indices, **options)
            if options["stream"] == "rollouts":
                self.note("sample")
                for entry in samples:
                    ids = [[r.token_ids for r in column.values()] for column in entry.responses]
                    self.said.setdefault((options["step"], entry.item_index), []).append(ids)
            return samples

        team.sample = spy

    def note(self, what):
        weights = [value.double().sum().item() for agent in weights_of(self.team) for value in agent.values()]
        self.events.append((what, self.trainer.global_step, hash(tuple(weights))))

    def setup(self, trainer, pl_module, stage):
        self.trainer = trainer

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note("train")


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("train_batch_size", [1, 2])
def test_a_rollout_has_the_weights_of_the_update_it_feeds(tmp_path, train_batch_size, accumulation):
    module = MARLModule(make_team(), learning_rate=1e-2, num_train_epochs=2)
    diary = Diary(module.team)
    data = {"rollout_batch_size": 2, "train_batch_size": train_batch_size, "eval_items": None}
    fit(tmp_path, module, FIVE, data=data, callbacks=[diary], accumulate_grad_batches=accumulation)
    epoch = ["sample", *["train"] * (2 // train_batch_size)] * 2 + ["sample", "train"]
    assert [what for what, *_ in diary.events] == epoch * 2
    for (what, *weights), (_, *next_weights) in zip(diary.events, diary.events[1:], strict=False):
        if what == "sample":
            assert weights == next_weights
    assert len({weights for _, _, weights in diary.events}) == len({step for _, step, _ in diary.events}) > 1


def said_in(root, seed=0, rollout_batch_size=2, **options):
    """What a run samples that hardly moves its weights, by epoch and item."""
    module = MARLModule(make_team(dtype="float64"), learning_rate=1e-30, num_train_epochs=2)
    diary = Diary(module.team)
    fit(root, module, FIVE, data={"rollout_batch_size": rollout_batch_size, "seed": seed, **options}, callbacks=[diary])
    return diary.said


@pytest.mark.slow
def test_draws_are_counted(tmp_path):
    said = said_in(tmp_path)
    assert set(said) == {(epoch, item) for epoch in range(2) for item in range(5)}
    assert all(len(times) == 1 for times in said.values())  # once per epoch
    assert all(said[0, item] != said[1, item] for item in range(5))
    assert said == said_in(tmp_path)
    assert said == said_in(tmp_path, rollout_batch_size=5, train_batch_size=2)
    assert said == said_in(tmp_path, rollout_batch_size=1)
    assert said == said_in(tmp_path, eval_items=None)
    other = said_in(tmp_path, seed=1)
    assert all(said[place] != other[place] for place in said)


def test_evaluation_changes_no_result(tmp_path):
    plain = fit(tmp_path, data={"eval_items": None})
    evaluated = fit(tmp_path, callbacks=[JointEvaluation(interval=1)])
    assert same_weights(weights_of(plain.team), weights_of(evaluated.team))


# Minibatches and ranks.


def run_loader(module, logged=None, **options):
    """The batches of an epoch of one process; what is reported of its rollouts."""
    loader = rollouts(module, **{"items": FIVE, **options})
    loader.on_rollout = lambda count, metrics: logged is not None and logged.append((count, metrics))
    batches = list(loader)
    assert len(batches) == len(loader)
    return batches


def test_an_items_responses_stay_together_in_an_order_of_each_epoch():
    module = MARLModule(speaking_team())
    orders = []
    for epoch in range(4):
        samples = listen(module.team)
        batches = run_loader(module, size=3, train_batch_size=2, epoch=epoch)
        del module.team.sample
        assert [len(batch) for batch in batches] == [2 * G, G, 2 * G]
        for i in range(2):
            parts = [(rows.input_ids, rows.attention_mask) for rows in (batch.agents[i] for batch in batches)]
            rows = [ids[mask].tolist() for part in parts for ids, mask in zip(*part, strict=True)]
            assert rows == [s.prompt_ids[i] + s.responses[i][g].token_ids for s in samples for g in range(G)]
        orders.append([sample.item_index for sample in samples])
        assert sorted(orders[-1]) == list(range(5))
    assert len(set(map(tuple, orders))) > 1


def unscored(*completions):
    """None by the text alone, for about a third."""
    return [None if round(5 * value) % 3 == 0 else value for value in reward(*completions)]


@DROPPED
@pytest.mark.parametrize("score", [reward, unscored])
@pytest.mark.parametrize("algorithm", ["magrpo", "maac", "iac"])
def test_fault_B35_minibatches_and_accumulation_give_the_gradient_of_one_big_batch(algorithm, score):
    module = MARLModule(speaking_team(), rl_algorithm=algorithm, critic=CRITICS.get(algorithm, lambda: None)())
    whole, expected, _ = step_gradients(module, run_loader(module, size=5, score=score))
    for size in (1, 2, 3):
        count = -(-5 // size)
        batches = run_loader(module, size=5, train_batch_size=size, score=score, accumulation=count)
        total, gradients, _ = step_gradients(module, batches, count)
        assert total == pytest.approx(whole, abs=1e-9)
        assert_same_gradients(gradients, expected)


def test_fault_B35_a_short_tail_and_accumulation_over_rollouts():
    module = MARLModule(speaking_team())
    single = run_loader(module, size=1)
    # An epoch of 5 items in rollouts of 2, two batches accumulated: updates of 4 items and of 1.
    batches = run_loader(module, size=2, accumulation=2)
    for chosen, places in ((batches[:2], range(4)), (batches[2:], range(4, 5))):
        _, gradients, _ = step_gradients(module, chosen, 2)
        each = [step_gradients(module, [single[place]])[1] for place in places]
        assert_same_gradients(gradients, {name: sum(g[name] for g in each) / len(each) for name in gradients})


@DROPPED
def test_an_update_is_the_mean_over_its_own_scored_responses():
    module = MARLModule(speaking_team(), rl_algorithm="mareinforce", advantage_normalization=False)

    def first_item_unscored(*completions):
        return [None if row < G else 2.0 for row in range(len(completions[0]))]

    batches = run_loader(module, items=FIVE[:2], size=2, train_batch_size=1, score=first_item_unscored)
    loss, *_ = step_gradients(module, batches[1:])
    with torch.no_grad():
        logps = [module.team.response_logps(agent, rows) for agent, rows in enumerate(batches[1].agents)]
    assert loss == pytest.approx(sum(-2.0 * rows.mean().item() for rows in logps), abs=1e-9)


def exchange(monkeypatch, module, logged, **options):
    """Batches of two ranks in one process: what each hands to the other is kept and merged in a second pass."""
    given, found = {0: [], 1: []}, {}
    for rank in (0, 1, 0):
        given[rank], turn = [], iter(range(99))

        def gather(work, rank=rank, turn=turn):
            index, parts = next(turn), work()
            given[rank].append(parts)
            merged = {k: v for both in given.values() if index < len(both) for k, v in both[index].items()}
            return [merged.get(key, merged[0]) for key in range(max(merged) + 1)]  # holes in the first pass alone

        monkeypatch.setattr(rollouts_module, "together", gather)
        logged[rank] = []
        found[rank] = run_loader(module, logged[rank], rank=rank, world_size=2, **options)
    return found


@DROPPED
@pytest.mark.parametrize("score", [reward, unscored])
@pytest.mark.parametrize("algorithm", ["magrpo", "maac"])
@pytest.mark.parametrize(("count", "size", "train"), [(3, 2, 2), (3, 2, 1), (3, 1, 1), (5, 2, 1)])
def test_two_ranks_are_one_process(monkeypatch, algorithm, score, count, size, train):
    module = MARLModule(speaking_team(), rl_algorithm=algorithm, critic=CRITICS.get(algorithm, lambda: None)())
    options = {"items": FIVE[:count], "score": score}
    _, expected, _ = step_gradients(module, run_loader(module, size=2 * size, train_batch_size=2 * train, **options), 1)
    ranks = exchange(monkeypatch, module, {}, size=size, train_batch_size=train, **options)
    assert len(ranks[0]) == len(ranks[1])
    both = [step_gradients(module, ranks[rank])[1] for rank in range(2)]
    assert_same_gradients({name: (both[0][name] + both[1][name]) / 2 for name in expected}, expected)
    assert not ranks[1][-1].weights[-G:].any()  # one item more than the ranks can share: the second fills up


def test_ranks_report_the_whole_rollout(monkeypatch):
    module, alone, logged = MARLModule(speaking_team()), [], {}
    run_loader(module, alone, size=4, items=FIVE[:3])
    exchange(monkeypatch, module, logged, size=2, items=FIVE[:3])
    assert [count for count, _ in alone] == [3 * G]
    assert [count for count, _ in logged[0]] == [count for count, _ in logged[1]] == [3 * G]
    [(_, expected)], [(_, found)] = alone, logged[0]
    assert found["turn_1/reward_mean"] == pytest.approx(expected["turn_1/reward_mean"])


def test_fault_B42_prompts_items_and_responses_belong_together(monkeypatch):
    module = MARLModule(speaking_team())
    heard, checked = listen(module.team), []

    def check(*completions, prompts, batch_items):
        rows = [(sample, g) for sample in heard[-len(batch_items) // G :] for g in range(G)]
        for row, (sample, g) in enumerate(rows):
            assert batch_items[row] is FIVE[sample.item_index]
            text = batch_items[row]["prompt"]
            assert [column[row] for column in prompts] == [text, f"To {text}:"]
            assert [column[row] for column in completions] == [sample.responses[i][g].text for i in range(2)]
            checked.append(sample.item_index)
        return reward(*completions)

    exchange(monkeypatch, module, {}, size=1, score=check)
    assert set(checked) == set(range(5))


# Resume.


def assert_same_batches(found, expected):
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert (batch.loss_scale, batch.num_generations) == (other.loss_scale, other.num_generations)
        for name in ("advantages", "returns", "weights", "rewards", "old_values"):
            one, two = getattr(batch, name), getattr(other, name)
            assert (one is None and two is None) or torch.equal(one, two), name
        for rows, others in zip(batch.agents + batch.critic_rows, other.agents + other.critic_rows, strict=True):
            assert all(torch.equal(getattr(rows, name), getattr(others, name)) for name in vars(rows))


@pytest.mark.parametrize("algorithm", ["magrpo", "maac", "iac"])
def test_a_loader_goes_on_with_the_same_minibatches(algorithm):
    module = MARLModule(speaking_team(), rl_algorithm=algorithm, reference_kl=ReferenceKL())
    options = {"items": FIVE, "size": 3, "train_batch_size": 1}
    expected = run_loader(module, **options)
    heard = listen(module.team)
    for taken in range(6):
        loader = rollouts(module, **options)
        for _ in zip(range(taken), loader, strict=False):
            pass
        file = io.BytesIO()
        torch.save(loader.state_dict(), file)
        file.seek(0)
        resumed = rollouts(module, **options)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        heard.clear()
        assert_same_batches(list(resumed), expected[taken % 5 :])
        assert len(heard) == {0: 5, 5: 5, 3: 2}.get(taken, 2 if taken < 3 else 0)
        assert_same_batches(list(resumed), expected)  # the next epoch begins at its beginning


class StopError(Exception):
    """What kills a run."""


class Killer(Callback):
    step = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise StopError


@pytest.mark.parametrize(
    ("algorithm", "lora", "step", "accumulation", "how"),
    [
        ("magrpo", False, 1, 1, "max_steps"),
        ("magrpo", True, 4, 1, "killed"),
        ("magrpo", True, 1, 2, "max_steps"),
        ("maac", False, 4, 1, "max_steps"),
        ("maac", True, 1, 1, "killed"),
        ("iac", False, 4, 1, "killed"),
        ("iac", True, 1, 1, "max_steps"),
    ],
)
def test_a_run_stopped_inside_a_rollout_ends_as_one_that_was_not(tmp_path, algorithm, lora, step, accumulation, how):
    def run(name, score, checkpoint=None, callbacks=(), **options):
        module = MARLModule(
            make_team(lora),
            rl_algorithm=algorithm,
            critic=AttachedCritics() if algorithm == "iac" else None,
            reference_kl=ReferenceKL(),
            num_generations=3,
            learning_rate=1e-2,
            num_train_epochs=2,
        )
        saver = ModelCheckpoint(tmp_path / name, filename="last", every_n_train_steps=1)
        # Three items one by one, of which the first rollout has two (three with accumulation).
        data = {"rollout_batch_size": 1 + accumulation, "train_batch_size": 1, "eval_items": None}
        options = {"accumulate_grad_batches": accumulation, "enable_checkpointing": True, **options}
        options |= {"score": score, "data": data, "callbacks": [saver, *callbacks], "checkpoint": checkpoint}
        return fit(tmp_path / name, module, **options)

    counts = CountingReward(), CountingReward()
    whole = run("whole", counts[0])
    killer = Killer()
    killer.step = step if how == "killed" else None
    run("stopped", counts[1], callbacks=[killer], max_steps=step if how == "max_steps" else -1)
    path = tmp_path / "stopped" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == step
    resumed = run("resumed", counts[1], str(path))
    assert same_weights(weights_of(whole.team), weights_of(resumed.team))
    if whole.critic is not None:
        critics = [module.critic.trained_parameters() for module in (whole, resumed)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*critics, strict=True))
    optimizers = [m.trainer.optimizers[0].state_dict()["state"] for m in (whole, resumed)]
    assert all(torch.equal(a, optimizers[1][i][key]) for i, entry in optimizers[0].items() for key, a in entry.items())
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert resumed.trainer.datamodule.env_step == whole.trainer.datamodule.env_step == 18
    assert counts[0].calls == counts[1].calls == 4 // accumulation  # nothing is sampled again


# What a run logs and clips.


@DROPPED
def test_what_a_run_logs(tmp_path):
    returned = []

    def partly(*completions):
        values = [None if row == 1 else value for row, value in enumerate(text_reward(*completions))]
        returned.append([value for value in values if value is not None])
        return values

    notes, evaluation = Notes(), JointEvaluation(interval=2)
    trainer = make_trainer(tmp_path, [evaluation], logger=notes, log_every_n_steps=1, accumulate_grad_batches=2)
    module = MARLModule(make_team(), rl_algorithm="maac", num_generations=3, num_train_epochs=3, learning_rate=1e-3)
    # Three items an epoch: a rollout of two in two batches, then one of one; accumulated, 2 updates an epoch.
    data = make_data(partly, iterative=False, rollout_batch_size=2, train_batch_size=1, eval_items=None)
    data.evaluator = make_data(iterative=False).evaluator
    trainer.fit(module, data)
    assert trainer.global_step == 6
    rewards = notes.of("turn_1/reward_mean")
    assert [step for step, _ in rewards] == [0, 1, 2, 3, 4, 5]
    assert [value for _, value in rewards] == pytest.approx([sum(values) / len(values) for values in returned])
    assert notes.of("turn_1/expected_return") == rewards
    steps = [metrics["env_step"] for _, metrics in notes.entries if "turn_1/reward_mean" in metrics]
    assert steps == [6, 9, 15, 18, 24, 27]  # joint responses, unscored ones among them
    assert data.env_step == 27
    for name in ("policy/loss", "value/loss"):
        assert [math.isfinite(value) for _, value in notes.of(name)] == [True] * 6
    assert [step for step, _ in evaluation.results] == [0, 2, 4, 6]


def test_fault_B72_clipping_is_per_group_and_after_the_backward(tmp_path):
    norms = []

    class Watch(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.optimizers[0].register_step_post_hook(self.look)

        def look(self, optimizer, *_):
            for group in optimizer.param_groups:
                norms.append(torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm().item())

    module = MARLModule(make_team(), rl_algorithm="mareinforce", advantage_normalization=False, num_train_epochs=1)
    data = make_data(lambda *c: [1e6 * (value + 1) for value in text_reward(*c)], iterative=False)
    make_trainer(tmp_path, [Watch()], gradient_clip_val=1.0).fit(module, data)
    assert norms == pytest.approx([1.0] * 4, rel=1e-3)
