"""What stays as it is in policy learning: the reference, with its KL penalty by literal loops, and a reward model."""

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from test_marl import (
    ITEMS,
    SAMPLING,
    G,
    Notes,
    assert_same_gradients,
    listen,
    literal_advantages,
    literal_logp,
    reward,
    rollouts,
    speaking_team,
    step_gradients,
)

from helpers import assert_close, save_model, tiny
from pbrl_lightning import (
    AgentTeam,
    AttachedCritics,
    JointCritic,
    JointRewardModel,
    LoraOptions,
    MARLModule,
    PreferenceDataModule,
    ReferenceKL,
    SamplingConfig,
)
from pbrl_lightning.agents.reference import ReferencePolicies
from training_runs import make_data, make_trainer, perturb, same_weights, weights_of

COEF = 0.3
KINDS = ("new_adapters", "saved_adapters", "full")


def make_start(kind, directory, dtype="float64", **options):
    """A team as a run finds it: the same one each time."""
    team = speaking_team(kind != "full", dtype, **options)
    if kind != "saved_adapters":
        if kind == "new_adapters":  # `speaking_team` moved them
            with torch.no_grad():
                for agent in range(team.num_agents):
                    for name, parameter in team.agent_parameters(agent).items():
                        if "lora_B" in name:
                            parameter.zero_()
        return team
    if not (directory / "start").exists():
        AgentTeam("builtin:tiny", num_agents=2, lora=LoraOptions(r=4)).save(directory / "zero")
        perturb(AgentTeam(str(directory / "zero")), seed=9).save(directory / "start")
    return AgentTeam(str(directory / "start"), dtype=dtype, formatters=["{prompt}", "To {prompt}:"])


def make(kind, directory, algorithm="magrpo", devices=None, **options):
    team = make_start(kind, directory)
    critic = {"iac": AttachedCritics(), "maac": JointCritic("builtin:tiny")}.get(algorithm)
    module = MARLModule(team, rl_algorithm=algorithm, critic=critic, reference_kl=ReferenceKL(COEF, devices), **options)
    module.load()
    return module


def token_logps(team, agent, rows, row):
    """Of the response tokens of one row, by a forward of the row alone."""
    length = int(rows.attention_mask[row].sum())
    ids = rows.input_ids[row, :length]
    with team.active(agent), torch.no_grad():
        logits = team.model(agent)(input_ids=ids[None]).logits[0]
    start = int(rows.response_mask[row].int().argmax())
    return [torch.log_softmax(logits[column - 1], dim=0)[ids[column]].item() for column in range(start, length)]


def literal_kl(team, start, agent, rows, row):
    """Sum over response tokens of exp(d) - d - 1 with d = log ref - log pi."""
    total = 0.0
    for ours, theirs in zip(token_logps(team, agent, rows, row), token_logps(start, agent, rows, row), strict=True):
        difference = theirs - ours
        total += math.exp(min(difference, 20.0)) - difference - 1
    return total


def move(team, seed=11, scale=0.1):
    return perturb(team, seed=seed, scale=scale)


@pytest.mark.parametrize("devices", [None, ["cpu"]], ids=["actors_devices", "own_devices"])
@pytest.mark.parametrize("kind", KINDS)
def test_fault_B52_the_kl_is_zero_at_the_start_and_a_literal_sum_after_updates(tmp_path, kind, devices):
    module = make(kind, tmp_path, devices=devices)
    start = make_start(kind, tmp_path)
    assert same_weights(weights_of(start), weights_of(module.team))
    batch = next(iter(rollouts(module)))
    kl, clamped = module.kl_to_reference(batch.agents)
    assert kl.abs().max() < 1e-9
    assert clamped.sum() == 0
    for _ in range(2):  # it stays the start, not the weights before the last update
        move(module.team)
        before = weights_of(module.team)
        flags = [p.requires_grad for p in module.parameters()]
        kl, _ = module.kl_to_reference(batch.agents)
        assert same_weights(before, weights_of(module.team))
        assert [p.requires_grad for p in module.parameters()] == flags
        expected = [
            [literal_kl(module.team, start, agent, rows, row) for row in range(len(batch))]
            for agent, rows in enumerate(batch.agents)
        ]
        expected = torch.tensor(expected, dtype=torch.float64)
        assert expected.min() > 1e-3
        assert not kl.requires_grad
        assert_close(kl.double(), expected, 1e-5)
        assert module.kl_coef == COEF


def shared_rewards(samples):
    return reward(*([sample.responses[agent][g].text for sample in samples for g in range(G)] for agent in range(2)))


@pytest.mark.parametrize("algorithm", ["magrpo", "mareinforce", "marloo", "maremax"])
def test_every_agents_own_reward_goes_into_its_baseline(tmp_path, algorithm):
    module = make("saved_adapters", tmp_path, algorithm)
    start = make_start("saved_adapters", tmp_path)
    move(module.team)
    samples = listen(module.team)
    batch = next(iter(rollouts(module)))
    shared = shared_rewards(samples)
    advantages, returns = [], []
    for agent, rows in enumerate(batch.agents):
        own = [shared[row] - COEF * literal_kl(module.team, start, agent, rows, row) for row in range(len(batch))]
        returns.append(own)
        groups = [own[item * G : (item + 1) * G] for item in range(len(ITEMS))]
        advantages.append([value for group in literal_advantages(groups, algorithm, True) for value in group])
    assert_close(batch.returns, torch.tensor(returns, dtype=torch.float64), 1e-5)
    assert_close(batch.advantages, torch.tensor(advantages, dtype=torch.float64), 1e-4)
    assert_close(batch.rewards, torch.tensor(shared, dtype=torch.float64))
    assert not torch.allclose(batch.advantages[0], batch.advantages[1], atol=1e-3)
    # What is subtracted is a constant: the policy loss is of these advantages and nothing else.
    literal = 0.0
    for agent in range(2):
        for row, (sample, g) in enumerate((sample, g) for sample in samples for g in range(G)):
            ids = sample.prompt_ids[agent], sample.responses[agent][g].token_ids
            literal = literal - advantages[agent][row] * literal_logp(module.team, agent, *ids) / len(batch)
    named = {f"agent_{i}/{name}": p for i in range(2) for name, p in module.team.agent_parameters(i).items()}
    expected = dict(zip(named, torch.autograd.grad(literal, list(named.values())), strict=True))
    assert_same_gradients(step_gradients(module, [batch])[1], expected, 1e-4)


@pytest.mark.parametrize("algorithm", ["iac", "maac"])
def test_what_critics_regress_on(tmp_path, algorithm):
    module = make("full", tmp_path, algorithm, advantage_normalization=False)
    start = make_start("full", tmp_path)
    move(module.team)
    samples = listen(module.team)
    batch = next(iter(rollouts(module)))
    shared = shared_rewards(samples)
    kl = [
        [literal_kl(module.team, start, agent, rows, row) for row in range(len(batch))]
        for agent, rows in enumerate(batch.agents)
    ]
    values = batch.old_values.tolist()
    expected = 0.0
    for row, value in enumerate(shared):
        if algorithm == "iac":
            expected += sum((values[i][row] - (value - COEF * kl[i][row])) ** 2 for i in range(2)) / len(batch)
        else:
            target = value - COEF * (kl[0][row] + kl[1][row]) / 2
            expected += (values[0][row] - target) ** 2 / len(batch)
        for agent in range(2):
            own = value - COEF * kl[agent][row] - values[agent if algorithm == "iac" else 0][row]
            assert batch.advantages[agent, row].item() == pytest.approx(own, abs=1e-5)
    _, _, logged = step_gradients(module, [batch])
    assert logged["value/loss"].item() == pytest.approx(expected, rel=1e-5)


def test_fault_B31_the_kl_of_a_gpt2_with_dropout_is_zero_at_the_start(tmp_path):
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    path = save_model(tiny("gpt2", torch.float32, seed=5, **dropout), tmp_path / "gpt2")
    notes = Notes()
    module = MARLModule(AgentTeam(path, num_agents=2), reference_kl=ReferenceKL(), num_train_epochs=1)
    module.load()
    module.train()  # policies stay as they are
    trainer = make_trainer(tmp_path, logger=notes, max_steps=1)
    trainer.fit(module, make_data(iterative=False))
    assert module.team.model(0).config.resid_pdrop == 0.1
    [(_, kl)] = notes.of("policy/kl")
    assert abs(kl) < 1e-5


@pytest.mark.parametrize("train_batch_size", [3, 1])
def test_fault_B22_clamped_tokens_are_finite_and_counted(train_batch_size):
    module = MARLModule(speaking_team(dtype="float32"), reference_kl=ReferenceKL())
    module.load()
    for agent in range(2):  # sure of itself, but heard at so high a temperature that it says anything
        with torch.no_grad():
            module.team.model(agent).get_output_embeddings().weight.mul_(30.0)
    logged = {}
    loader = rollouts(
        module,
        sampling=SamplingConfig(temperature=1e5, top_p=1.0, top_k=None, max_new_tokens=5),
        train_batch_size=train_batch_size,
        on_rollout=lambda _, metrics: logged.update(metrics),
    )
    batches = list(loader)
    clamped = 0
    for batch in batches:
        for agent, rows in enumerate(batch.agents):
            with torch.no_grad():
                ours = module.team.score_responses(agent, rows).token_logps
                theirs = module._reference[0].score_responses(agent, rows).token_logps
            clamped += int((theirs - ours > 20).sum())
        assert batch.returns.isfinite().all()
        assert batch.advantages.isfinite().all()
    assert clamped > 10
    assert math.isfinite(logged["policy/kl"])
    assert logged["policy/kl_clamped_tokens"] == clamped
    loss, gradients, _ = step_gradients(module, batches)
    assert math.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


class FirstWeights(Callback):
    """The reference's log-probabilities of one fixed batch, whenever a batch begins."""

    def __init__(self, batch):
        self.batch, self.seen = batch, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        reference = pl_module._reference[0]
        self.seen.append([reference.score_responses(i, rows).token_logps for i, rows in enumerate(self.batch.agents)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fault_B52_the_reference_is_the_start_after_updates_and_a_resume(tmp_path, kind):
    start = make_start(kind, tmp_path, "float32")
    batch = next(iter(rollouts(MARLModule(start))))
    with torch.no_grad():
        expected = [start.score_responses(agent, rows).token_logps for agent, rows in enumerate(batch.agents)]
    saver = ModelCheckpoint(tmp_path / "c", filename="last", every_n_train_steps=1)
    seen = []
    for options in ({"max_steps": 4}, {}):
        watch, notes = FirstWeights(batch), Notes()
        module = MARLModule(
            make_start(kind, tmp_path, "float32"), reference_kl=ReferenceKL(), learning_rate=1e-2, num_train_epochs=3
        )
        trainer = make_trainer(tmp_path, [watch, saver], logger=notes, enable_checkpointing=True, **options)
        path = None if options else str(tmp_path / "c" / "last.ckpt")
        data = make_data(iterative=False, sampling=SAMPLING, rollout_batch_size=1)
        trainer.fit(module, data, ckpt_path=path, weights_only=True)
        seen.append(len(watch.seen))
        kls = [value for _, value in notes.of("policy/kl")]
        assert abs(kls[0]) < 1e-5 if options else kls[0] > 1e-3
        assert min(kls[1:]) > 1e-4
        assert kls[-1] > 1e-3
        for found in watch.seen:
            for logps, wanted in zip(found, expected, strict=True):
                assert_close(logps, wanted)
        state = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)
        names = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        assert set(state["state_dict"]) == names
    assert seen == [4, 5]


def test_new_adapters_cost_nothing_and_saved_ones_a_copy_of_themselves(tmp_path):
    costs = {}
    for kind in KINDS:
        team = make_start(kind, tmp_path)
        reference = ReferencePolicies(team, None)
        kept = [v for values in reference._values if values is not None for v in values.values()]
        assert (reference._copy is not None) == (kind == "full")
        costs[kind] = sum(value.numel() for value in kept)
    adapters = sum(
        p.numel() for i in range(2) for p in make_start("new_adapters", tmp_path).agent_parameters(i).values()
    )
    assert costs == {"new_adapters": 0, "saved_adapters": adapters, "full": 0}


def test_the_reference_is_nobodys_parameter(tmp_path):
    module = make("full", tmp_path)
    copy = module._reference[0]._copy
    inside = {id(p) for p in module.parameters()}
    assert not any(id(p) in inside or p.requires_grad for p in copy.parameters())
    assert all("_reference" not in name for name in module.state_dict())
    assert not any(isinstance(m, type(copy)) and m is copy for m in module.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": 0.0}, "`coef` must be > 0 .*got 0.0"),
        ({"coef": -1.0}, "`coef` must be > 0"),
        ({"devices": []}, "`devices` must name at least one device"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ReferenceKL(**options)


def test_off_by_default_and_then_nothing_is_subtracted():
    module = MARLModule(speaking_team())
    assert module.reference_kl is None
    logged = SimpleNamespace(metrics={})
    batch = next(iter(rollouts(module, on_rollout=lambda _, metrics: logged.metrics.update(metrics))))
    assert torch.equal(batch.returns, batch.rewards.expand(2, -1))
    assert "policy/kl" not in logged.metrics


# A reward model that was fitted before.


@pytest.mark.parametrize("kind", ["saved", "team"])
def test_a_reward_model_scores_frozen_and_without_a_task_reward(tmp_path, kind):
    reward_model = JointRewardModel("team")
    if kind == "saved":
        fitted = JointRewardModel(save_model(tiny("llama", torch.float32, seed=4), tmp_path / "lm"), seed=7).load()
        fitted.save(tmp_path / "reward")
        reward_model = JointRewardModel(str(tmp_path / "reward"))
    team = speaking_team(True, "float32")
    module = MARLModule(team, reward_model=reward_model, learning_rate=1e-2, num_train_epochs=1)
    if kind == "team":
        with pytest.raises(ValueError, match="`reward_model` was never fitted"):
            module.load()
        reward_model.fitted = True  # as after a MARLHFModule's fit
    heard, states, before = listen(team), [], []

    class Watch(Callback):
        def on_train_start(self, trainer, pl_module):
            reward_model.register_forward_hook(self.look)
            before.extend(p.detach().clone() for p in reward_model.trained_parameters())

        def look(self, *_):
            parts = [*(reward_model.classifier or team.backbones).modules()]
            states.append((torch.is_grad_enabled(), sum(part.training for part in parts if not [*part.children()])))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            texts = [[response.text for response in column.values()] for column in heard[-1].responses]
            scores = reward_model.score_texts(*texts, prompts=[[prompt] * G for prompt in heard[-1].prompts])
            assert_close(batch.rewards, torch.tensor(scores, dtype=torch.float64), 1e-5)

    trainer = make_trainer(tmp_path, [Watch()])
    trainer.fit(module, PreferenceDataModule(ITEMS, sampling=SAMPLING, rollout_batch_size=1))
    assert trainer.global_step == 3
    assert states == [(False, 0)] * 6
    own = reward_model.trained_parameters()
    assert all(torch.equal(now, earlier) for now, earlier in zip(own, before, strict=True))
    learns = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert not any(id(p) in learns for p in own)
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert all(".agent_" in name for name in checkpoint["state_dict"])
    # DDP stops at a trainable parameter that gets no gradient.
    assert all(".agent_" in name for name, p in module.named_parameters() if p.requires_grad)
