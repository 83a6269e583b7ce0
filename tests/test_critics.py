"""Critics against literal loops: what they read, what they are taught, and whom their loss reaches."""

import math

import pytest
import torch
from test_marl import (
    DROPPED,
    ITEMS,
    G,
    assert_same_gradients,
    listen,
    literal_logp,
    literal_rewards,
    partial_reward,
    reward,
    rollouts,
    speaking_team,
    step_gradients,
    trained,
)

from helpers import assert_close, save_model, tiny
from pbrl_lightning import (
    AgentTeam,
    AttachedCritics,
    CurrentComparator,
    JointCritic,
    LoraOptions,
    MARLModule,
    PreferenceDataModule,
    SeparateCritics,
)
from pbrl_lightning.agents.loading import tiny_tokenizer
from training_runs import make_data, make_team, make_trainer, same_weights, weights_of

COEF = 0.6
KINDS = {
    "attached": ("iac", lambda kind: AttachedCritics(kind)),
    "separate": ("iac", lambda kind: SeparateCritics(critic_type=kind, dtype="float64")),
    "separate_on_the_team": ("iac", lambda kind: SeparateCritics("team", critic_type=kind, lora=LoraOptions(r=2))),
    "joint": ("maac", lambda kind: JointCritic(critic_type=kind, dtype="float64")),
    "joint_on_the_team": ("maac", lambda kind: JointCritic("team", critic_type=kind, freeze_backbone=True)),
}


def make(kind, critic_type="v", lora=False, team=None, **options):
    """A module whose critics say something: fresh heads give almost 0."""
    algorithm, critic = KINDS[kind]
    module = MARLModule(team or speaking_team(lora), rl_algorithm=algorithm, critic=critic(critic_type), **options)
    module.load()
    return stir(module)


def heads(module):
    return module.critic.heads if module.critic.attached else [model.head for model in module.critic.models]


def stir(module, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for head in heads(module):
            noise = torch.randn(head.weight.shape, generator=generator, dtype=torch.float64)
            head.weight.add_(0.2 * noise.to(head.weight.dtype))
    return module


def literal_state(module, index, sample, g):
    """What one critic's head reads of one response: one forward of one row."""
    team, critic = module.team, module.critic
    q = critic.critic_type == "q"
    if critic.attached:
        ids = sample.prompt_ids[index] + (sample.responses[index][g].token_ids if q else [])
        with team.active(index):
            return team.model(index)(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    model = critic.models[index]
    if isinstance(critic, JointCritic):
        text = "".join(f"### Prompt of agent {i}\n{prompt}\n\n" for i, prompt in enumerate(sample.prompts))
        answer = "\n\n".join(f"### Response of agent {i}\n{sample.responses[i][g].text}" for i in range(2))
    else:
        text, answer = sample.prompts[index], sample.responses[index][g].text
    ids = model.tokenizer(text)["input_ids"]
    ids += model.tokenizer(answer, add_special_tokens=False)["input_ids"] if q else []
    with model._active():
        return model._decoder(input_ids=torch.tensor([ids]))[0][0, -1]


def each(count, samples, value):
    """By agent or critic, item and generation."""
    return [[[value(index, sample, g) for g in range(G)] for sample in samples] for index in range(count)]


def literal_states(module, samples):
    return each(len(heads(module)), samples, lambda index, sample, g: literal_state(module, index, sample, g))


def literal_logps(module, samples):
    def logp(agent, sample, g):
        return literal_logp(module.team, agent, sample.prompt_ids[agent], sample.responses[agent][g].token_ids)

    return each(2, samples, logp)


def literal_values(module, states):
    return [
        [[state.to(head.weight.dtype) @ head.weight[0] for state in row] for row in rows]
        for head, rows in zip(heads(module), states, strict=True)
    ]


def literal_advantages(module, rewards, old_values, normalise):
    """By agent, item and generation; None without a reward."""
    found = []
    for agent in range(2):
        values = old_values[agent if len(old_values) > 1 else 0]
        rows = []
        for group, value in zip(rewards, values, strict=True):
            kept = [g for g in range(G) if group[g] is not None]
            mean_q = sum(value[g].item() for g in kept) / len(kept)
            row = [None] * G
            for g in kept:
                row[g] = value[g].item() - mean_q if module.critic.critic_type == "q" else group[g] - value[g].item()
            rows.append(row)
        flat = [entry for row in rows for entry in row if entry is not None]
        mean = sum(flat) / len(flat)
        deviation = math.sqrt(sum((entry - mean) ** 2 for entry in flat) / len(flat))
        deviation = max(deviation, abs(mean)) if normalise else 1.0
        found.append([[None if entry is None else entry / deviation for entry in row] for row in rows])
    return found


def literal_losses(module, rewards, logps, values, old_values, advantages):
    """Policy loss and value loss, each summed over agents or critics and a mean over scored responses."""
    places = [(item, g) for item, group in enumerate(rewards) for g in range(G) if group[g] is not None]
    policy, value = 0.0, 0.0
    for item, g in places:
        for agent in range(2):
            policy = policy - advantages[agent][item][g] * logps[agent][item][g] / len(places)
        for index in range(len(heads(module))):
            now, old = values[index][item][g], old_values[index][item][g].item()
            error = (now - rewards[item][g]) ** 2
            if module.critic.attached and abs(now.item() - old) > 0.2:
                clipped = old + (0.2 if now.item() > old else -0.2)
                if (clipped - rewards[item][g]) ** 2 > error.item():
                    error = torch.tensor((clipped - rewards[item][g]) ** 2)  # a constant: no gradient
            value = value + error / len(places)
    return policy, value


def gradients_of(loss, module):
    named = trained(module)
    values = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if v is None else v for (n, p), v in zip(named.items(), values, strict=True)}


@DROPPED
@pytest.mark.parametrize("score", [reward, partial_reward], ids=["all_scored", "some_unscored"])
@pytest.mark.parametrize(
    ("kind", "lora", "critic_type", "normalise"),
    [
        ("attached", False, "v", True),
        ("attached", False, "q", False),
        ("attached", True, "v", False),
        ("attached", True, "q", True),
        ("separate", False, "v", False),
        ("separate", False, "q", True),
        ("separate_on_the_team", True, "v", True),
        ("joint", False, "v", True),
        ("joint", False, "q", False),
        ("joint_on_the_team", True, "q", True),
    ],
)
def test_the_gradient_of_a_step_equals_a_literal_loop(kind, lora, critic_type, normalise, score):
    module = make(kind, critic_type, lora, advantage_normalization=normalise)
    samples = listen(module.team)
    batch = next(iter(rollouts(module, score)))
    rewards = literal_rewards(score, samples)
    states, logps = literal_states(module, samples), literal_logps(module, samples)
    old_values = literal_values(module, states)
    advantages = literal_advantages(module, rewards, old_values, normalise)
    for moved in (False, True):
        if moved:  # as after an earlier minibatch: advantages and the clipping's centre stay the rollout's
            stir(module, seed=2)
        policy, value = literal_losses(module, rewards, logps, literal_values(module, states), old_values, advantages)
        expected = gradients_of(policy + COEF * value, module)
        loss, gradients, logged = step_gradients(module, [batch])
        # Adapters are float32 in a float64 model (PEFT's choice for trained parts), and so are Llama's norms.
        assert_same_gradients(gradients, expected, 1e-5 if lora else None)
        assert loss == pytest.approx((policy + COEF * value).item(), abs=1e-5)
        assert logged["value/loss"].item() == pytest.approx(value.item(), abs=1e-5)
        assert logged["policy/loss"].item() == pytest.approx(policy.item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["attached", "separate", "joint"])
def test_whom_the_value_loss_reaches(kind):
    module = make(kind)
    batch = next(iter(rollouts(module)))
    found = []
    for coef in (0.5, 1.0, 2.0):
        module.value_loss_coef = coef
        found.append(step_gradients(module, [batch])[1])
    value = {name: found[2][name] - found[1][name] for name in found[0]}
    assert any(value[name].any() for name in value if "critic" in name)
    assert any(value[name].any() for name in value if "agent" in name) == (kind == "attached")
    assert_same_gradients(
        {name: found[1][name] - found[0][name] for name in value}, {n: v / 2 for n, v in value.items()}
    )


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_clipping_range_of_attached_heads(clip):
    critic = AttachedCritics(value_clip_range=clip)
    module = MARLModule(speaking_team(), rl_algorithm="iac", critic=critic)
    batch = next(iter(rollouts(module)))
    old = batch.old_values
    for head in critic.heads:
        head.weight.data.mul_(8.0)
    _, _, logged = step_gradients(module, [batch])
    errors = (8.0 * old - batch.returns) ** 2
    if clip is not None:
        clipped = (old + (7.0 * old).clamp(-clip, clip) - batch.returns) ** 2
        assert (clipped > errors).any()
        errors = torch.maximum(errors, clipped)
    assert logged["value/loss"].item() == pytest.approx(errors.sum(0).mean().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["separate", "joint"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_v_reads_the_prompt_and_q_the_response_too(kind, critic_type):
    module = make(kind, critic_type)
    samples = listen(module.team)
    next(iter(rollouts(module)))
    prompts = [[sample.prompts[agent] for sample in samples] for agent in range(2)]
    texts = [[sample.responses[agent][g].text for sample in samples for g in range(G)] for agent in range(2)]
    others = [[f"{text} and more" for text in column] for column in texts]
    rows = module.critic_rows(prompts, texts)
    assert (rows == module.critic_rows(prompts, others)) == (critic_type == "v")
    assert [len(column) for column in rows] == [len(ITEMS) * (1 if critic_type == "v" else G)] * len(rows)
    assert rows != module.critic_rows([[f"{text}!" for text in column] for column in prompts], texts)


@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_an_attached_v_does_not_change_with_the_response(critic_type):
    module = make("attached", critic_type)
    batch = next(iter(rollouts(module)))
    before = module.old_values(batch.agents, [])
    for rows in batch.agents:
        rows.input_ids[rows.response_mask] = 99
    assert torch.allclose(before, module.old_values(batch.agents, []), atol=1e-6) == (critic_type == "v")
    for rows in batch.agents:
        rows.input_ids[:, 1] = 99
    assert not torch.allclose(before, module.old_values(batch.agents, []), atol=1e-3)


@pytest.mark.parametrize("kind", ["attached", "separate", "joint"])
def test_fault_B34_columns_of_padding_change_no_value(kind):
    module = make(kind, "q")
    batch = next(iter(rollouts(module)))
    wide = []
    for rows in [*batch.agents, *batch.critic_rows]:
        fill = torch.zeros(len(rows.input_ids), 50)
        parts = zip(vars(rows).values(), (fill.long() + 7, fill.bool(), fill.bool()), strict=True)
        wide.append(type(rows)(*(torch.cat(both, 1) for both in parts)))
    assert_close(module.old_values(wide[:2], wide[2:]), batch.old_values)
    _, expected, _ = step_gradients(module, [batch])
    batch.agents, batch.critic_rows = wide[:2], wide[2:]
    assert_same_gradients(step_gradients(module, [batch])[1], expected)


def other_tokenizer():
    """Letters in another order than the byte tokenizer's, without BOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(["<e>", *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", pad_token="<e>")


@pytest.mark.parametrize("kind", ["separate", "joint"])
@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_critics_of_another_architecture_and_tokenizer(tmp_path, kind, critic_type):
    path = save_model(tiny("gpt2", torch.float32, seed=5, n_positions=256), tmp_path / "gpt2", other_tokenizer())
    options = {"critic_type": critic_type, "dtype": "float64"}
    critic = SeparateCritics(path, **options) if kind == "separate" else JointCritic(path, **options)
    module = MARLModule(speaking_team(), rl_algorithm="iac" if kind == "separate" else "maac", critic=critic)
    module.load()
    samples = listen(module.team)
    batch = next(iter(rollouts(stir(module))))
    with torch.no_grad():
        literal = torch.tensor(literal_values(module, literal_states(module, samples)), dtype=torch.float64)
    assert_close(batch.old_values, literal.flatten(1), 1e-6)
    assert all(int(rows.input_ids[0, 0]) != 0 for rows in batch.critic_rows)  # no BOS of the actors' tokenizer
    assert step_gradients(module, [batch])[1]["critic/0"].any()


def test_a_critic_object_of_the_users_own():
    model = tiny("gpt2", torch.float64, seed=5)
    critic = JointCritic(model, tokenizer=tiny_tokenizer())
    module = MARLModule(speaking_team(), rl_algorithm="maac", critic=critic)
    _, gradients, _ = step_gradients(module, [next(iter(rollouts(module)))])
    assert gradients["critic/0"].any()
    assert sum("critic" in name for name in gradients) == len(list(model.base_model.parameters())) + 1


@pytest.mark.parametrize("kind", ["attached", "separate_on_the_team"])
def test_recomputed_activations_change_no_gradient(kind):
    found = []
    for on in (False, True):
        module = make(kind, "q", team=speaking_team(True, gradient_checkpointing=on))
        for model in getattr(module.critic, "models", ()):
            model.gradient_checkpointing = on
        found.append(step_gradients(module, [next(iter(rollouts(module)))])[1])
    assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("kind", ["joint", "separate", "attached"])
def test_critics_are_updated_once_per_minibatch_with_their_own_rate(tmp_path, kind):
    critic = {"joint": JointCritic, "separate": SeparateCritics, "attached": AttachedCritics}[kind]()
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 3e-3}
    team = speaking_team(dtype="float32")
    module = MARLModule(team, rl_algorithm=KINDS[kind][0], critic=critic, num_train_epochs=2, **rates)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, make_data(iterative=False, rollout_batch_size=2, train_batch_size=1))
    assert trainer.global_step == 6
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {"agent_0": 1e-3, "agent_1": 1e-3, "critic": 3e-3}
    assert {id(p) for p in groups["critic"]["params"]} == {id(p) for p in critic.trained_parameters()}
    state = trainer.optimizers[0].state
    assert {int(state[p]["step"]) for p in groups["critic"]["params"]} == {6}


@pytest.mark.parametrize(("kind", "rate"), [("joint", 5e-6), ("joint_on_the_team", 1e-4)])
def test_the_critics_rate_is_the_first_agents_by_default(kind, rate):
    assert make(kind, lora="team" in kind).parameter_groups()[-1]["lr"] == rate


@pytest.mark.parametrize("kind", list(KINDS))
def test_renew_makes_critics_new_and_leaves_the_actors(kind):
    lora = "team" in kind
    module = make(kind, lora=lora)
    fresh = MARLModule(speaking_team(lora), rl_algorithm=KINDS[kind][0], critic=KINDS[kind][1]("v"))
    fresh.load()
    actors = weights_of(module.team)
    drawn = {}
    for number in (2, 3, 2, 1):
        for parameter in module.critic.trained_parameters():
            parameter.data.add_(0.1)
        places = [id(p) for p in module.critic.trained_parameters()]
        module.critic.renew(number)
        assert [id(p) for p in module.critic.trained_parameters()] == places  # the optimizer's own
        now = [head.weight.detach().clone() for head in heads(module)]
        assert all(torch.equal(a, b) for a, b in zip(drawn.setdefault(number, now), now, strict=True))
        of_heads = [id(head.weight) for side in (fresh, module) for head in heads(side)]
        below = [[p for p in side.critic.trained_parameters() if id(p) not in of_heads] for side in (fresh, module)]
        assert all(torch.equal(a, b) for a, b in zip(*below, strict=True))  # the backbone as loaded
    assert all(torch.equal(a.weight, b) for a, b in zip(heads(fresh), drawn[1], strict=True))
    assert not torch.equal(drawn[2][0], drawn[3][0])
    assert len({tuple(weight.flatten().tolist()) for weight in drawn[2]}) == len(drawn[2])
    assert same_weights(actors, weights_of(module.team))


# Runs that cannot work.


def objects():
    """Loaded models that have no name."""
    return AgentTeam([tiny("llama"), tiny("llama")], tokenizers=[tiny_tokenizer(), tiny_tokenizer()])


def critics(model):
    return SeparateCritics([model, model], tokenizers=[tiny_tokenizer(), tiny_tokenizer()])


IAC, MAAC = {"rl_algorithm": "iac"}, {"rl_algorithm": "maac"}
NO_REWARD = {"reward_func": None, "eval_items": None}


@pytest.mark.parametrize(
    ("team", "options", "data", "message"),
    [
        (objects, IAC, {}, "critic model needs `model`: agent 0 is a loaded model without a name"),
        (objects, MAAC, {}, "critic model needs `model`"),
        (make_team, {**IAC, "critic": critics(tiny("llama"))}, {}, "one model object is given for two critics"),
        (make_team, {**IAC, "critic": SeparateCritics(["builtin:tiny"])}, {}, "one per agent"),
        (make_team, {**MAAC, "critic": JointCritic("team")}, {}, "needs a LoRA team"),
        (make_team, {}, {"comparator": CurrentComparator()}, "takes no `comparator`"),
        (make_team, {}, {"pairs": ["pairs.json"], "items": None}, "MARLModule learns from rollouts and takes no `pair"),
        (make_team, {}, {"items": None}, "`items`.*must be given"),
        (make_team, {}, NO_REWARD, "`reward_func` must be given with `items`"),
    ],
)
def test_runs_that_cannot_work_stop_before_anything_is_loaded(tmp_path, team, options, data, message):
    data = {"items": ITEMS, "reward_func": reward, "eval_items": ITEMS, **data}
    team = team()
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(MARLModule(team, **options), PreferenceDataModule(**data))
    assert not team.is_loaded
