"""MARL's training step against literal loops over agents, responses and tokens, and its errors."""

import copy
import functools
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from helpers import assert_close, save_model, tiny
from pbrl_lightning import (
    AgentTeam,
    AttachedCritics,
    JointCritic,
    LoraOptions,
    MARLModule,
    SamplingConfig,
    SeparateCritics,
)
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.rollouts import RolloutLoader
from training_runs import make_data, make_team, make_trainer, perturb

G = 4
ITEMS = [{"prompt": text} for text in ("ab", "c", "defg")]
SAMPLING = SamplingConfig(temperature=1.5, top_p=0.9, top_k=40, max_new_tokens=5)
GROUP = ("magrpo", "mareinforce", "marloo", "maremax")
DROPPED = pytest.mark.filterwarnings("ignore:.*dropped, not scored 0")


def reward(*completions):
    """From -2 to 2.6, by every agent's text."""
    return [(sum(map(ord, "|".join(texts))) % 24) / 5 - 2 for texts in zip(*completions, strict=True)]


def partial_reward(*completions):
    """The same, with nothing for some rows: at least two of each four are scored."""
    return [{1: None, 3: math.nan}.get(row % 5, value) for row, value in enumerate(reward(*completions))]


@functools.cache
def gpt2():
    """A directory with a model that computes all of itself in float64: Llama's norms would go through float32."""
    model = tiny("gpt2", torch.float64, seed=5, n_positions=256)
    return save_model(model, Path(tempfile.mkdtemp(dir=os.environ["PBRL_CACHE"])))


def speaking_team(lora=False, dtype="float64", **options):
    """Agents that differ, whose logits are far from uniform, and who often end before the token limit."""
    options = {"num_agents": 2, "formatters": ["{prompt}", "To {prompt}:"], **options}
    name, adapters = ("builtin:tiny", LoraOptions(r=4)) if lora else (gpt2(), None)
    team = perturb(AgentTeam(name, lora=adapters, dtype=dtype, **options), seed=4)
    with torch.no_grad():
        for model in {id(team.model(agent)): team.model(agent) for agent in range(team.num_agents)}.values():
            head = model.get_output_embeddings().weight
            head.mul_(20 if lora else 0.5)
            head[1].mul_(2.5 if lora else 3.0)
    return team


SCALE = {True: (20, 2.5), False: (1, 1.5)}


def rollouts(module, score=reward, items=None, sampling=SAMPLING, size=3, **options):
    """A loader as the data module makes it, without a trainer."""
    module.load()
    items = ITEMS if items is None else items
    options = {"train_batch_size": size, "seed": 0, **options}
    return RolloutLoader(module, module.team, items, Oracle(score), sampling, rollout_batch_size=size, **options)


def listen(team):
    """A list that gets every sample of the team."""
    heard, sample = [], team.sample

    def spy(*arguments, **options):
        samples = sample(*arguments, **options)
        heard.extend(samples)
        return samples

    team.sample = spy
    return heard


def alone(module):
    """Lets a module step without a trainer; what it logs."""
    logged = {}
    module.log_dict = lambda values, **_: logged.update(values)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(env_step=0))
    return logged


def trained(module):
    """All that learns, by name."""
    agents = range(module.team.num_agents)
    named = {f"agent_{i}/{name}": p for i in agents for name, p in module.team.agent_parameters(i).items()}
    critics = [] if module.critic is None else module.critic.trained_parameters()
    return named | {f"critic/{index}": p for index, p in enumerate(critics)}


def step_gradients(module, batches, accumulation=1):
    """Loss and gradients as Lightning gets them."""
    logged = alone(module)
    module.zero_grad(set_to_none=True)
    total = 0.0
    for index, batch in enumerate(batches):
        loss = module.training_step(batch, index) / accumulation
        loss.backward()
        total += loss.item()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained(module).items()}
    return total, found, logged


def literal_logp(team, agent, prompt, response):
    """log pi(response | prompt): one full forward, then token by token, EOS included."""
    with team.active(agent):
        logits = team.model(agent)(input_ids=torch.tensor([prompt + response])).logits[0]
    total = 0.0
    for position, token in enumerate(response):
        total = total + torch.log_softmax(logits[len(prompt) + position - 1], dim=0)[token]
    return total


def literal_rewards(score, samples):
    """Rewards by item and generation, None where there is none."""
    rows = [(sample, g) for sample in samples for g in range(G)]
    values = score(*([sample.responses[agent][g].text for sample, g in rows] for agent in range(2)))
    values = [None if value is None or math.isnan(value) else value for value in values]
    return [values[item * G : (item + 1) * G] for item in range(len(samples))]


def literal_advantages(rewards, algorithm, normalise):
    """Of each item and generation by the table of S9."""
    advantages = []
    for group in rewards:
        scored = [value for value in group if value is not None]
        mean = sum(scored) / len(scored)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in scored) / len(scored))
        row = []
        for g, value in enumerate(group):
            if value is None:
                row.append(None)
                continue
            others = [other for k, other in enumerate(group) if k != g and other is not None]
            baselines = {
                "magrpo": mean,
                "mareinforce": 0.0,
                "marloo": sum(others) / len(others),
                "maremax": max(scored),
            }
            row.append((value - baselines[algorithm]) / (deviation if normalise else 1.0))
        advantages.append(row)
    return advantages


def literal_gradients(said, advantages):
    """Of minus the mean over scored responses of advantage times log-probability, agent by agent."""
    total, found = 0.0, {}
    for agent in range(2):
        terms = [
            -advantage * said.logps[agent][item][g]
            for item, row in enumerate(advantages)
            for g, advantage in enumerate(row)
            if advantage is not None
        ]
        loss = sum(terms) / len(terms)
        parameters = said.team.agent_parameters(agent)
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        found |= {f"agent_{agent}/{name}": value for name, value in zip(parameters, gradients, strict=True)}
        total += loss.item()
    return total, found


def assert_same_gradients(actual, expected, tolerance=None):
    assert actual.keys() == expected.keys()
    assert any(gradient.any() for gradient in expected.values())
    for name, gradient in actual.items():
        assert_close(gradient, expected[name], tolerance)


class Notes(Logger):
    """Keeps everything that is logged, with its step."""

    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append((step, dict(metrics)))

    def log_hyperparams(self, *_):
        pass

    def of(self, key):
        return [(step, metrics[key]) for step, metrics in self.entries if key in metrics]


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def said(request):
    """What a team says in its first rollout of all items, with the literal log-probabilities of all responses."""
    team = speaking_team(request.param)
    samples = listen(team)
    next(iter(rollouts(MARLModule(team))))
    del team.sample
    lengths = {len(r.token_ids) for s in samples for column in s.responses for r in column.values()}
    assert len(lengths) > 2  # ended responses among them
    logps = [
        [
            [literal_logp(team, agent, s.prompt_ids[agent], s.responses[agent][g].token_ids) for g in range(G)]
            for s in samples
        ]
        for agent in range(2)
    ]
    return SimpleNamespace(team=team, samples=samples, logps=logps)


@DROPPED
@pytest.mark.parametrize("score", [reward, partial_reward], ids=["all_scored", "fault_B39_B40_some_unscored"])
@pytest.mark.parametrize("normalise", [False, True], ids=["plain", "normalised"])
@pytest.mark.parametrize("algorithm", GROUP)
def test_the_gradient_of_a_step_equals_a_literal_loop(said, algorithm, normalise, score):
    rewards = literal_rewards(score, said.samples)
    loss, expected = literal_gradients(said, literal_advantages(rewards, algorithm, normalise))
    module = MARLModule(said.team, rl_algorithm=algorithm, advantage_normalization=normalise)
    found, gradients, logged = step_gradients(module, [next(iter(rollouts(module, score)))])
    assert_same_gradients(gradients, expected)
    assert found == pytest.approx(loss, abs=1e-9)
    assert logged["policy/loss"].item() == pytest.approx(loss, abs=1e-9)


def direction(gradients):
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients) if "critic" not in name])


def test_the_six_algorithms_differ_with_default_settings(said):
    critics = {"maac": JointCritic(dtype="float64"), "iac": SeparateCritics(dtype="float64")}
    found = {}
    for algorithm in (*GROUP, "maac", "iac"):
        module = MARLModule(said.team, rl_algorithm=algorithm, critic=critics.get(algorithm))
        module.load()
        for index, model in enumerate([] if module.critic is None else module.critic.models):
            torch.manual_seed(index)
            model.head.weight.data.normal_(std=0.12)  # fresh heads give almost 0
        _, gradients, _ = step_gradients(module, [next(iter(rollouts(module)))])
        found[algorithm] = direction(gradients)
    tolerance = 1e-9 if said.team.adapter(0) is None else 1e-5
    assert_close(found.pop("marloo"), found["magrpo"] * G / (G - 1), tolerance)
    names = sorted(found)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            assert torch.cosine_similarity(found[first], found[second], dim=0) < 0.999, (first, second)


@pytest.mark.parametrize("normalise", [False, True], ids=["plain", "normalised"])
@pytest.mark.parametrize("algorithm", GROUP)
def test_fault_B26_equal_rewards_give_exactly_no_gradient(said, algorithm, normalise):
    def equal_within_items(*completions, batch_items):
        return [0.1 if item["prompt"] == "c" else 1.7 for item in batch_items]

    module = MARLModule(said.team, rl_algorithm=algorithm, advantage_normalization=normalise)
    _, gradients, _ = step_gradients(module, [next(iter(rollouts(module, equal_within_items)))])
    assert any(gradient.any() for gradient in gradients.values()) == (algorithm == "mareinforce")


def test_fault_B10_B29_log_probabilities_are_of_the_sampled_ids_at_temperature_one(said):
    module = MARLModule(said.team)
    batch = next(iter(rollouts(module)))
    drifted = 0
    for agent, rows in enumerate(batch.agents):
        logps = said.team.response_logps(agent, rows)
        for row, (sample, g) in enumerate((sample, g) for sample in said.samples for g in range(G)):
            response = sample.responses[agent][g]
            assert rows.input_ids[row][rows.response_mask[row]].tolist() == response.token_ids
            drifted += said.team.tokenizer(agent).encode(response.text, add_special_tokens=False) != [
                token for token in response.token_ids if token != 1
            ]
            assert_close(logps[row], said.logps[agent][row // G][row % G])
    assert drifted  # texts that do not encode to what was sampled
    _, _, logged = step_gradients(module, [batch])
    every = torch.stack([logp for agent in said.logps for item in agent for logp in item])
    assert logged["policy/logp"].item() == pytest.approx(every.mean().item(), abs=1e-9)


def test_fault_B01_B33_pad_equal_to_eos_and_what_lies_in_the_padding(said):
    tokenizers = [tiny_tokenizer() for _ in range(2)]
    for tokenizer in tokenizers:
        tokenizer.pad_token = tokenizer.eos_token
    other = speaking_team(said.team.adapter(0) is not None, tokenizers=tokenizers)
    assert other.tokenizer(0).pad_token_id == 1
    found = []
    for team in (said.team, other):
        module = MARLModule(team)
        batch = next(iter(rollouts(module)))
        found.append(step_gradients(module, [batch])[1])
        ended = [rows.input_ids[rows.response_mask] == 1 for rows in batch.agents]
        assert sum(int(ids.sum()) for ids in ended) > 2
    assert_same_gradients(found[1], found[0])
    for rows in batch.agents:
        rows.input_ids[~rows.attention_mask] = 77
    assert_same_gradients(step_gradients(module, [batch])[1], found[0])


@DROPPED
@pytest.mark.parametrize("scored", [(), (2,)], ids=["none", "fault_B24_one_of_each_item"])
@pytest.mark.parametrize("algorithm", ["magrpo", "marloo"])
def test_fault_B39_rollouts_that_teach_nothing(said, algorithm, scored):
    module = MARLModule(said.team, rl_algorithm=algorithm)
    batch = next(iter(rollouts(module, lambda *c: [5.0 if row % G in scored else None for row in range(len(c[0]))])))
    loss, gradients, logged = step_gradients(module, [batch])
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())
    assert bool(logged) == bool(scored)


@pytest.mark.parametrize("temperature", [0.0, 1e-4])
@pytest.mark.filterwarnings("ignore:temperature 0 makes")
def test_fault_B30_nearly_greedy_rollouts_stay_finite(said, temperature):
    module = MARLModule(said.team, rl_algorithm="mareinforce")
    batch = next(iter(rollouts(module, sampling=SamplingConfig(temperature=temperature, max_new_tokens=5))))
    loss, gradients, _ = step_gradients(module, [batch])
    assert math.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_fault_B51_three_adapters_get_gradients_and_nothing_else_does():
    team = speaking_team(True, num_agents=3, formatters=None)
    module = MARLModule(team, rl_algorithm="mareinforce")
    wanted = {name for name, p in team.named_parameters() if p.requires_grad}
    step_gradients(module, [next(iter(rollouts(module)))])
    assert {name for name, p in team.named_parameters() if p.requires_grad} == wanted
    assert {name for name, p in team.named_parameters() if p.grad is not None and p.grad.any()} == wanted
    assert {name.split(".agent_")[1][0] for name in wanted} == {"0", "1", "2"}


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "`num_generations` must be >= 2 with `rl_algorithm: magrpo`, got 1"),
        (
            {"rl_algorithm": "maac", "critic": JointCritic(critic_type="q"), "num_generations": 1},
            "`num_generations` must be >= 2 .*critic_type q, got 1",
        ),
        ({"rl_algorithm": "iac", "num_generations": 0}, "`num_generations` must be >= 1"),
        ({"rl_algorithm": "maac", "critic": SeparateCritics()}, "takes a JointCritic .*got SeparateCritics"),
        ({"rl_algorithm": "iac", "critic": JointCritic()}, "SeparateCritics or AttachedCritics.*got JointCritic"),
        ({"rl_algorithm": "marloo", "critic": AttachedCritics()}, "takes no `critic`"),
        ({"rl_algorithm": "ppo"}, "`rl_algorithm` must be one of magrpo, .*iac, got 'ppo'"),
        ({"critic_learning_rate": 1e-3}, "takes no `critic_learning_rate`"),
        ({"rl_algorithm": "iac", "critic_learning_rate": -1.0, "value_loss_coef": 0.0}, "learning_rate.*_loss_coef"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        MARLModule(AgentTeam("builtin:tiny", num_agents=2), **options)


class Poison(Callback):
    """NaN in one weight between sampling and the second update."""

    def __init__(self, parameter):
        self.parameter = parameter

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            self.parameter(pl_module).data.view(-1)[0] = math.nan
            self.before = copy.deepcopy(pl_module.state_dict())


@pytest.mark.parametrize(
    ("parameter", "guilty"),
    [
        (lambda module: module.team.agent_parameters(1)["model.norm.weight"], "batch 1 .*agent 1's log-probabilities"),
        (lambda module: module.critic.models[0].head.weight, "batch 1 .*critic 0's values"),
    ],
    ids=["agent", "critic"],
)
def test_a_non_finite_loss_names_its_cause_and_leaves_the_weights(tmp_path, parameter, guilty):
    poison = Poison(parameter)
    module = MARLModule(make_team(), rl_algorithm="maac", learning_rate=1e-2)
    data = make_data(iterative=False, rollout_batch_size=2, train_batch_size=1)
    with pytest.raises(FloatingPointError, match=guilty) as raised:
        make_trainer(tmp_path, [poison]).fit(module, data)
    assert "agent 0" not in str(raised.value)
    after = module.state_dict()
    assert all(torch.equal(value.nan_to_num(9.0), after[name].nan_to_num(9.0)) for name, value in poison.before.items())
