"""MARLHF: which phase trains what and when, the renewal of reward and critic, who scores, empty rounds, pair files."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from helpers import assert_close
from pbrl_lightning import HistoryComparator, LambdaDecayReplay, LoraOptions, PreferenceDataModule, ReferenceKL
from pbrl_lightning.batches import PairBatch, PreferencePair
from pbrl_lightning.callbacks import JointEvaluation
from pbrl_lightning.models.critic import AttachedCritics, JointCritic, SeparateCritics
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.modules.madpo import MADPOModule
from pbrl_lightning.modules.marl import MARLModule
from pbrl_lightning.modules.marlhf import MARLHFModule
from pbrl_lightning.preferences.round_files import write_round_file
from pbrl_lightning.rounds import RoundCallback
from training_runs import (
    EVAL_ITEMS,
    ITEMS,
    SAMPLING,
    CountingReward,
    make_data,
    make_team,
    make_trainer,
    perturb,
    round_files,
    text_reward,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ITEM_CALLS = 2 * len(ITEMS)  # reward calls of a round's collection: both sides of each item
POLICY_STEPS = 2  # three items in rollouts of two


def make_marlhf(team=None, rounds=None, **options):
    """One epoch per phase, two generations, rates that show."""
    short = {"num_reward_epochs": 1, "num_train_epochs": 1, "num_generations": 2}
    rates = {"learning_rate": 1e-3, "reward_learning_rate": 1e-3}
    return MARLHFModule(team or make_team(), num_iterations=rounds, **{**short, **rates, **options})


TEAM_REWARD = {"reward_model": partial(JointRewardModel, "team")}
# A LoRA team or not, and what the module gets.
KINDS = {
    "full": (False, {}),
    "reference": (False, {"reference_kl": ReferenceKL}),
    "head": (False, {"reward_model": partial(JointRewardModel, freeze_backbone=True)}),
    "lora": (True, TEAM_REWARD),
    "lora_head": (True, {"reward_model": partial(JointRewardModel, "team", freeze_backbone=True)}),
    "lora_maac": (True, {**TEAM_REWARD, "rl_algorithm": "maac", "critic": partial(JointCritic, "team")}),
    "maac": (False, {"rl_algorithm": "maac", "critic": JointCritic}),
    "iac": (False, {"rl_algorithm": "iac", "critic": SeparateCritics}),
    "iac_attached": (False, {"rl_algorithm": "iac", "critic": AttachedCritics}),
}


def of_kind(kind, rounds, **options):
    lora, given = KINDS[kind]
    made = {name: value() if callable(value) else value for name, value in given.items()}
    return make_marlhf(perturb(make_team(lora), 1), rounds, **made, **options)


def some_data(reward=None, iterative=True, **options):
    return make_data(reward or CountingReward(), iterative=iterative, **{"eval_items": None, **options})


def parts_of(module):
    """What a run holds: agents, reward model, critic, reference, and all that is frozen."""
    parts = {f"agent_{i}": list(module.team.agent_parameters(i).values()) for i in range(module.team.num_agents)}
    parts["reward"] = module.reward_model.trained_parameters()
    if module.critic is not None:
        parts["critic"] = module.critic.trained_parameters()
    for reference in module.policy._reference:
        parts["reference"] = list(reference._copy.parameters())
    known = {id(parameter) for parameters in parts.values() for parameter in parameters}
    parts["frozen"] = [parameter for parameter in module.parameters() if id(parameter) not in known]
    return parts


def copy_of(module):
    return {name: [p.detach().clone() for p in parameters] for name, parameters in parts_of(module).items()}


def same(values, others):
    return len(values) == len(others) and all(map(torch.equal, values, others))


class Watch(RoundCallback):
    """Per batch its phase, what it changed, and the rates; per round the weights (and reward model) at its marks."""

    def __init__(self):
        self.batches, self.events, self.rates, self.changed, self.models = [], [], [], [], {}
        self.at_start, self.collected, self.at_first_batch, self.kept_state = {}, {}, {}, {}

    @property
    def phases(self):
        return ["reward" if isinstance(batch, PairBatch) else "policy" for batch in self.batches]

    def on_round_start(self, trainer, pl_module, round_number):
        self.events.append(f"start {round_number}")
        self.at_start[round_number] = copy_of(pl_module)
        self.models[round_number] = deepcopy(pl_module.reward_model)

    def on_round_collected(self, trainer, pl_module, record):
        self.collected[record.round] = copy_of(pl_module)

    def on_round_end(self, trainer, pl_module, round_number):
        self.events.append(f"end {round_number}")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)
        self.before = copy_of(pl_module)
        self.events.append(self.phases[-1])
        optimizer, number = trainer.optimizers[0], trainer.datamodule.current_round
        self.rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
        if number not in self.at_first_batch:
            self.at_first_batch[number], parts = self.before, parts_of(pl_module)
            self.kept_state[number] = {n for n, ps in parts.items() if any(p in optimizer.state for p in ps)}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        after = copy_of(pl_module)
        self.changed.append({name for name in after if not same(after[name], self.before[name])})


def fit(root, module, data, callbacks=(), **options):
    watch = Watch()
    trainer = make_trainer(root, [watch, *callbacks], **options)
    trainer.fit(module, data)
    return trainer, watch


def read(team, rows):
    """Prompts and responses of one agent's rows as text."""
    decode = partial(team.tokenizer(0).decode, skip_special_tokens=True)
    masks = (rows.attention_mask & ~rows.response_mask, rows.response_mask)
    return [[decode(ids[kept]) for ids, kept in zip(rows.input_ids, mask, strict=True)] for mask in masks]


# -- schedule and defaults -----------------------------------------------------------------------------------------


def test_the_schedules_and_defaults_of_base_and_iterative_runs():
    module = MARLHFModule(make_team())
    base, iterative = module.make_schedule(False), module.make_schedule(True)
    assert (base.num_rounds, base.phases) == (1, (("reward", 1), ("policy", 20)))
    assert (iterative.num_rounds, iterative.phases) == (6, (("reward", 2), ("policy", 2)))
    own = MARLHFModule(make_team(), num_iterations=3, num_reward_epochs=4, num_train_epochs=5).make_schedule(True)
    assert (own.num_rounds, own.phases) == (3, (("reward", 4), ("policy", 5)))
    policy = module.policy
    assert (policy.rl_algorithm, policy.num_generations, policy.advantage_normalization) == ("magrpo", 4, True)
    assert (policy.value_loss_coef, policy.reference_kl) == (0.6, None)
    assert (ReferenceKL().coef, AttachedCritics().value_clip_range) == (0.1, 0.2)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_defaults_that_a_run_has(tmp_path, lora):
    data = PreferenceDataModule(ITEMS, text_reward, sampling=SAMPLING, num_candidates=3, pairs_per_sample=1)
    module = MARLHFModule(make_team(lora), rl_algorithm="maac", num_train_epochs=1)
    trainer, watch = fit(tmp_path, module, data)
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    rates = dict.fromkeys(("agent_0", "agent_1", "critic"), 1e-4 if lora else 5e-6)
    assert {name: group["lr"] for name, group in groups.items()} == {**rates, "reward": 1e-5}
    assert {group["weight_decay"] for group in groups.values()} == {0.01}
    sizes = [len(batch) for batch in watch.batches]
    assert sizes == [1] * data.rounds[0].train_pairs + [2 * 4, 1 * 4]  # a pair; two items and one, of 4 generations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_iterations": 0}, "`num_iterations` must be >= 1, got 0"),
        ({"num_reward_epochs": 0}, "epochs` must be >= 1, got 0"),
        ({"reward_learning_rate": 0.0}, "`reward_learning_rate` must be > 0, got 0"),
        ({"num_generations": 1}, "`num_generations` must be >= 2"),
        ({"critic": JointCritic()}, "takes no `critic`"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        MARLHFModule(make_team(), **options)


# -- which phase trains what ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fault_B51_each_phase_moves_its_own_parts_alone(tmp_path, kind):
    module = of_kind(kind, 2, weight_decay=0.5)  # which moves what merely stands in the optimizer
    data = some_data(pairs_per_sample=1)
    trainer, watch = fit(tmp_path, module, data)
    learners = {"agent_0", "agent_1"} | ({"critic"} if module.critic is not None else set())
    assert watch.changed == [{"reward"} if phase == "reward" else learners for phase in watch.phases]
    pairs = [record.train_pairs for record in data.rounds]
    assert all(pairs)
    expected = []
    for number, count in enumerate(pairs, 1):
        expected += [f"start {number}", *["reward"] * count, *["policy"] * POLICY_STEPS, f"end {number}"]
    assert watch.events == expected
    assert (trainer.global_step, module.policy_updates) == (sum(pairs) + 2 * POLICY_STEPS, 2 * POLICY_STEPS)
    parts, start = copy_of(module), watch.at_start[1]
    assert same(parts["frozen"], start["frozen"])
    if kind == "reference":  # the team as it began
        assert same(parts["reference"], start["agent_0"] + start["agent_1"])


def test_fault_B51_an_adapter_on_the_teams_backbone_is_fitted_as_one_on_a_backbone_of_its_own(tmp_path):
    found = []
    for name in ("team", "builtin:tiny"):
        module = make_marlhf(perturb(make_team(True), 1), reward_model=JointRewardModel(name, lora=LoraOptions(r=4)))
        fit(tmp_path / name, module, some_data(iterative=False, pairs_per_sample=1), max_epochs=1)
        found.append(module.reward_model.trained_parameters())
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["full", "iac_attached"])
def test_accumulated_batches_are_one_big_batch(tmp_path, kind):
    found = []
    for size, count in ((2, 1), (1, 2)):  # three pairs and three items: the last step is a short one
        options = {**KINDS[kind][1], "critic": AttachedCritics() if kind == "iac_attached" else None}
        options |= {"reward_model": JointRewardModel(dtype="float64"), "num_train_epochs": 2}
        module = make_marlhf(make_team(dtype="float64"), 2, **options)
        data = some_data(pairs_per_sample=1, batch_size=size, train_batch_size=size)
        trainer, _ = fit(tmp_path / str(size), module, data, accumulate_grad_batches=count)
        assert (trainer.global_step, module.policy_updates) == (2 * (2 + 2 * 2), 8)
        found.append(copy_of(module))
    for name in set(found[0]) - {"frozen"}:
        for ours, theirs in zip(found[0][name], found[1][name], strict=True):
            assert_close(ours, theirs, 1e-7)


# -- renewal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "lora_maac", "iac", "iac_attached"])
def test_reward_and_critic_are_newly_initialised_after_collection(tmp_path, kind):
    module, data = of_kind(kind, 3), some_data(pairs_per_sample=1)
    trainer, watch = fit(tmp_path, module, data)
    renewed = {"reward", "critic"} & set(parts_of(module))
    for name in renewed:
        heads = 2 if name == "critic" and "iac" in kind else 1
        for number in (2, 3):
            old, new = watch.at_start[number][name], watch.at_first_batch[number][name]
            assert same(watch.collected[number][name], old)  # still there while the round is collected
            assert not same(new, old)
            differing = [v for v, w in zip(new, watch.at_first_batch[number - 1][name], strict=True) if not v.equal(w)]
            assert [value.shape[0] for value in differing] == [1] * heads  # backbones and adapters are as loaded
            assert kind != "lora_maac" or sum(not value.any() for value in new) == len(new) // 2  # A and 0, and a head
            assert all(same(watch.at_first_batch[number][n], watch.at_start[number][n]) for n in ("agent_0", "agent_1"))
    assert watch.kept_state == {1: set(), 2: {"agent_0", "agent_1"}, 3: {"agent_0", "agent_1"}}
    updates = {"critic": POLICY_STEPS, "reward": data.rounds[2].train_pairs}
    for name in renewed | {"agent_0", "agent_1"}:
        steps = {int(trainer.optimizers[0].state[p]["step"]) for p in parts_of(module)[name]}
        assert steps == {updates.get(name, 3 * POLICY_STEPS)}


def test_fault_B73_schedules_count_their_groups_updates_and_restart_with_the_model(tmp_path):
    rates = {"agent_0": 1e-3, "agent_1": 1e-3, "critic": 4e-3, "reward": 2e-3}
    options = {"rl_algorithm": "maac", "critic_learning_rate": 4e-3, "reward_learning_rate": 2e-3}
    module = make_marlhf(rounds=3, num_train_epochs=2, lr_scheduler=lambda o: LambdaLR(o, lambda n: 0.5**n), **options)
    _, watch = fit(tmp_path, module, some_data(pairs_per_sample=1, batch_size=2))
    expected, updates = [], dict.fromkeys(rates, 0)
    for before, phase in pairwise(["policy", *watch.phases]):
        if (before, phase) == ("policy", "reward"):  # a new round
            updates |= {"critic": 0, "reward": 0}
        expected.append({name: rate * 0.5 ** updates[name] for name, rate in rates.items()})
        for name in updates:
            updates[name] += (name == "reward") == (phase == "reward")
    assert updates == {"agent_0": 12, "agent_1": 12, "critic": 4, "reward": 2}
    assert watch.rates == [pytest.approx(row, rel=1e-9) for row in expected]


# -- who scores what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True], ids=["from_round_1", "round_1_empty"])
def test_the_last_fitted_reward_model_scores_new_comparisons(tmp_path, empty):
    reward = CountingReward(set(range(ITEM_CALLS)) if empty else ())
    data = some_data(reward, preference_scoring_reward="reward_model")
    _, watch = fit(tmp_path, make_marlhf(rounds=3, reward_learning_rate=1e-2), data)
    by_task = [1, 2] if empty else [1]  # until a reward model is fitted
    assert reward.calls == ITEM_CALLS * len(by_task)
    for number, content in enumerate(round_files(tmp_path / "replay").values(), 1):
        assert bool(content["pairs"]) == (not (empty and number == 1))
        for pair in content["pairs"]:
            for side in ("winner", "loser"):
                texts, prompts = ([[t] for t in pair[key]] for key in (f"{side}_completions", "prompts"))
                learned = watch.models[number].score_texts(*texts, prompts=prompts)
                assert_close(pair[f"{side}_reward"], (text_reward(*texts) if number in by_task else learned)[0], 1e-4)
    assert number == 3


def test_rollouts_get_the_fitted_models_scores_and_evaluation_the_task_reward(tmp_path):
    reward, evaluation, team = CountingReward(), JointEvaluation(interval=0, num_samples=5), make_team()
    module, data = make_marlhf(team), some_data(reward, iterative=False, eval_items=EVAL_ITEMS)
    trainer, watch = fit(tmp_path, module, data, [evaluation])
    assert reward.calls == len(ITEMS) + 2
    assert watch.phases.count("policy") == POLICY_STEPS
    for batch in watch.batches[-POLICY_STEPS:]:
        (prompts, responses), (other_prompts, others) = (read(team, rows) for rows in batch.agents)
        scores = module.reward_model.score_texts(responses, others, prompts=[prompts, other_prompts])
        assert_close(batch.rewards, torch.tensor(scores, dtype=torch.float64), 1e-4)
    samples = team.sample(EVAL_ITEMS, list(range(5)), num_candidates=1, sampling=SAMPLING, seed=0, stream="evaluation")
    mean = sum(text_reward(*[[text] for text in sample.completions(0)])[0] for sample in samples) / 5
    assert evaluation.results[-1] == (trainer.global_step, pytest.approx(mean))
    (found,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    assert found["eval/turn_1/reward_mean"] == pytest.approx(mean)


# -- rounds without pairs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [{1}, {2}, {3}, {1, 3}, {1, 2, 3}], ids=str)
def test_fault_B37_B83_rounds_whose_replay_is_empty_pass_without_an_update(tmp_path, empty):
    ties = {ITEM_CALLS * (number - 1) + call for number in empty for call in range(ITEM_CALLS)}
    reward, module = CountingReward(ties), make_marlhf(make_team(True), 3, num_train_epochs=2)
    data = some_data(reward, batch_size=100, comparator=HistoryComparator(1))
    trainer, watch = fit(tmp_path, module, data)
    work, expected = ["reward"] + ["policy"] * 2 * POLICY_STEPS, []
    for number in (1, 2, 3):
        expected += [f"start {number}", *([] if number in empty else work), f"end {number}"]
    assert watch.events == expected
    assert reward.calls == 3 * ITEM_CALLS
    assert trainer.state.finished
    files = round_files(tmp_path / "replay").values()
    assert [content["num_pairs"] == 0 for content in files] == [number in empty for number in (1, 2, 3)]
    assert (tmp_path / "history" / "iteration_0002" / "agent_1").is_dir()


def test_a_round_that_collected_nothing_fits_and_learns_on_earlier_pairs(tmp_path):
    ties = set(range(ITEM_CALLS, 2 * ITEM_CALLS))
    data = some_data(CountingReward(ties), replay=LambdaDecayReplay(0.5), pairs_per_sample=1)
    _, watch = fit(tmp_path, make_marlhf(rounds=2), data)
    first, second = data.rounds
    assert (second.collected_pairs, second.train_pairs) == (0, first.collected_pairs)
    assert watch.phases == (["reward"] * first.train_pairs + ["policy"] * POLICY_STEPS) * 2
    assert not same(watch.at_start[2]["reward"], watch.at_first_batch[2]["reward"])


def test_fault_B83_a_base_run_of_ties_ends_normally_without_an_update(tmp_path):
    module, watch = make_marlhf(num_train_epochs=3), Watch()
    trainer = make_trainer(tmp_path, [watch])
    with pytest.warns(UserWarning, match="round 1 has no pairs to train on"):
        trainer.fit(module, some_data(lambda *c: [1.0] * len(c[0]), iterative=False))
    assert (trainer.state.finished, trainer.global_step, module.policy_updates) == (True, 0, 0)
    assert watch.events == ["start 1", "end 1"]
    assert same(watch.at_start[1]["agent_0"], copy_of(module)["agent_0"])


# -- pair files and data options -----------------------------------------------------------------------------------


@pytest.fixture
def pair_file(tmp_path):
    sides = [["x", "y"], ["zz", "w"]]
    pairs = [PreferencePair([p, p], *sides[:: 1 if p in "pq" else -1], 1.0, 0.0, 0.5) for p in "pqr"]
    write_round_file(tmp_path / "pairs.json", 1, pairs)
    return str(tmp_path / "pairs.json")


def test_a_reward_from_pair_files_and_a_policy_stage_on_items(tmp_path, pair_file):
    team, data = make_team(), PreferenceDataModule(ITEMS, pairs=[pair_file], sampling=SAMPLING)  # and no task reward
    _, watch = fit(tmp_path / "run", make_marlhf(team), data)
    assert watch.phases == ["reward"] * 3 + ["policy"] * POLICY_STEPS
    for batch in watch.batches[:3]:
        (prompt, _), (winner, _) = read(team, batch.agents[0])
        assert ("zz" in winner, "x" in winner) == (r := "\nr\n" in prompt, not r)
    assert {prompt for batch in watch.batches[3:] for prompt in read(team, batch.agents[0])[0]} == {"a", "b", "c"}
    assert data.env_step == len(ITEMS) * 2
    assert not (tmp_path / "run" / "replay").exists()


WITH_TASK = {"pairs": None, "reward_func": text_reward}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (make_marlhf, {"items": None}, "a MARLHFModule needs `items` for its policy stage besides `pairs`"),
        (make_marlhf, {"pairs": None}, "`reward_func` must be given with `items`"),
        (make_marlhf, {"val_fraction": 0.1}, r"`val_fraction` is for a MADPOModule or Joint.* a MARLHFModule"),
        (make_marlhf, {**WITH_TASK, "preference_scoring_reward": "reward_model"}, "and a `comparator`"),
        (MADPOModule, {**WITH_TASK, "preference_scoring_reward": "reward_model"}, "needs a MARLHFModule"),
        (make_marlhf, {"preference_scoring_reward": "x"}, "must be 'task' or 'reward_model', got 'x'"),
        (MARLModule, {}, "a MARLModule learns from rollouts and takes no `pairs`"),
        (partial(make_marlhf, rounds=2), WITH_TASK, r"`num_iterations` is 2, but .* `comparator`"),
        (partial(make_marlhf, reward_model=JointRewardModel("team")), WITH_TASK, "needs a LoRA team on one frozen"),
    ],
)
def test_a_data_module_that_does_not_fit_is_found_before_a_model_is_loaded(tmp_path, pair_file, make, options, message):
    team = make_team()
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, make(team), PreferenceDataModule(**{"items": ITEMS, "pairs": [pair_file], **options}))
    assert not team.is_loaded
