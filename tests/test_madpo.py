"""MADPO against the literal procedure: all margins without gradients, then agent by agent."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid

from pbrl_lightning import AgentTeam, LoraOptions, MADPOModule, PairBatch
from pbrl_lightning.preferences.pair_tokens import collate_rows

BETA = 0.3
PROMPTS = [[[0, 10, 11, 12], [0, 20]], [[0, 30, 31], [0, 40, 41, 42, 43]], [[0, 50], [0, 60, 61]]]
WINNERS = [[[70, 71, 1], [80, 81]], [[72, 73, 74, 75], [82, 1]], [[76, 77], [83, 84, 85, 1]]]
LOSERS = [[[90, 91], [100, 101, 102, 1]], [[92, 93, 1], [103, 104]], [[94, 95, 96, 97], [105, 1]]]


def pair_batch(weights=None, rows=(0, 1, 2), loss_scale=None):
    agents = []
    for agent in range(2):
        prompts = [PROMPTS[row][agent] for row in rows] * 2
        responses = [WINNERS[row][agent] for row in rows] + [LOSERS[row][agent] for row in rows]
        agents.append(collate_rows(prompts, responses, pad_id=1))  # pad == eos
    weights = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    return PairBatch(agents, weights, loss_scale or 1 / len(rows), torch.full((len(rows),), 0.5))


def make_team(lora=None, gradient_checkpointing=False):
    team = AgentTeam(
        "builtin:tiny", num_agents=2, dtype="float64", lora=lora, gradient_checkpointing=gradient_checkpointing
    ).load()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # agents that differ, and adapters that do something
        for agent in range(2):
            for parameter in team.agent_parameters(agent).values():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.05 * noise.to(parameter.dtype))
    return team


def make_module(team, **options):
    module = MADPOModule(team, dpo_beta=BETA, **options)
    logged = {}
    module.log_dict = lambda values, **_: logged.update(values)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(env_step=0))
    return module, logged


def literal_logp(team, agent, prompt, response, score_last_token):
    """log pi(response | prompt) of one row by a full forward and a loop over its tokens."""
    ids = torch.tensor([prompt + response])
    with team.active(agent):
        logits = team.model(agent)(input_ids=ids).logits[0]
    total = torch.zeros((), dtype=torch.float64)
    for position in range(len(response) if score_last_token else len(response) - 1):
        column = len(prompt) + position
        total = total + torch.log_softmax(logits[column - 1], dim=0)[response[position]]
    return total


def literal_gradients(team, score_last_token=False):
    """The seed's procedure: every margin without gradients, then one backward per agent with the others detached."""

    def margin(row, agent):
        winner = literal_logp(team, agent, PROMPTS[row][agent], WINNERS[row][agent], score_last_token)
        return winner - literal_logp(team, agent, PROMPTS[row][agent], LOSERS[row][agent], score_last_token)

    with torch.no_grad():
        fixed = [[margin(row, agent) for agent in range(2)] for row in range(3)]
    gradients, losses = [], []
    for agent in range(2):
        loss = torch.zeros((), dtype=torch.float64)
        for row in range(3):
            joint = margin(row, agent) + fixed[row][1 - agent]
            loss = loss - logsigmoid(BETA * joint) / 3
        parameters = team.agent_parameters(agent)
        values = torch.autograd.grad(loss, list(parameters.values()))
        gradients.append(dict(zip(parameters, values, strict=True)))
        losses.append(loss.item())
    return losses, gradients


def step_gradients(module, team, batches):
    team.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = module.training_step(batch, 0)
        loss.backward()
        total += loss.item()
    return total, [{name: p.grad.clone() for name, p in team.agent_parameters(agent).items()} for agent in range(2)]


@pytest.mark.parametrize("lora", [None, LoraOptions(r=4)], ids=["full", "lora"])
@pytest.mark.parametrize("score_last_token", [False, True])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_one_joint_backward_equals_the_agent_by_agent_procedure(lora, score_last_token, gradient_checkpointing):
    team = make_team(lora, gradient_checkpointing)
    module, _ = make_module(team, score_last_token=score_last_token)
    losses, expected = literal_gradients(team, score_last_token)
    loss, gradients = step_gradients(module, team, [pair_batch()])
    # Adapters are float32 in a float64 model: PEFT's choice for trained parts.
    tolerance = 1e-6 if lora is None else 1e-5
    assert abs(loss - losses[0]) < tolerance
    assert abs(loss - losses[1]) < tolerance
    for agent in range(2):
        assert gradients[agent].keys() == expected[agent].keys()
        for name, gradient in gradients[agent].items():
            torch.testing.assert_close(gradient, expected[agent][name], rtol=tolerance, atol=tolerance, msg=name)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0].values())


def test_fault_B01_pad_equal_to_eos_takes_no_weight_from_eos():
    eos, team = 1, make_team()
    module, _ = make_module(team, score_last_token=True)
    prompt, winner, loser = [0, 10, eos, 11, eos, 12], [70, 71, eos], [90, 91, 92, 93, eos]

    def joint(responses, pad):
        agents = [collate_rows([prompt, prompt], responses, pad)] * 2
        return PairBatch(agents, torch.ones(1), 1.0, torch.zeros(1))

    def literal(responses):
        with torch.no_grad():
            margin = sum(
                literal_logp(team, agent, prompt, responses[0], True)
                - literal_logp(team, agent, prompt, responses[1], True)
                for agent in range(2)
            )
        return -logsigmoid(BETA * margin).item()

    losses, gradients = zip(
        *(step_gradients(module, team, [joint([winner, loser], pad)]) for pad in (eos, 2)), strict=True
    )
    assert losses[0] == pytest.approx(literal([winner, loser]), abs=1e-9)
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    for agent in range(2):
        for name, gradient in gradients[0][agent].items():
            torch.testing.assert_close(gradients[1][agent][name], gradient, rtol=1e-9, atol=1e-12)
    # Each EOS has its own weight in the loss.
    for responses in ([winner[:-1], loser], [winner, loser[:-1]]):
        cut = module.training_step(joint(responses, eos), 0).item()
        assert cut == pytest.approx(literal(responses), abs=1e-9)
        assert abs(cut - losses[0]) > 1e-3


def long_batch(num_agents=3, length=500):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 259, (num_agents, 2, length), generator=generator).tolist()
    agents = [collate_rows([[0, 5, 6]] * 2, [winner, loser[: length - 100]], 2) for winner, loser in tokens]
    return PairBatch(agents, torch.ones(1), 1.0, torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["weights", "autocast"])
def test_fault_B20_long_responses_in_half_precision_sum_in_float32(dtype, mixed):
    name = "float32" if mixed else str(dtype).removeprefix("torch.")
    team = AgentTeam("builtin:tiny", num_agents=3, dtype=name).load()
    exact = AgentTeam("builtin:tiny", num_agents=3, dtype="float32").load()
    exact.load_state_dict({name: value.float() for name, value in team.state_dict().items()})
    values = {}
    for key, some in (("half", team), ("exact", exact)):
        module, logged = make_module(some, score_last_token=True)
        with torch.autocast("cpu", dtype, enabled=mixed and key == "half"):
            loss = module.training_step(long_batch(), 0)
            logps = [some.response_logps(agent, rows).detach() for agent, rows in enumerate(long_batch().agents)]
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(torch.isfinite(p.grad).all() for p in some.parameters())
        values[key] = (loss.item(), logged["train/margin"].item(), torch.stack(logps))
    assert values["half"][2].dtype == torch.float32
    assert values["exact"][2].abs().min() > 1000
    torch.testing.assert_close(values["half"][2], values["exact"][2], rtol=1e-2, atol=0)
    assert values["half"][1] == pytest.approx(values["exact"][1], rel=1e-2)
    assert values["half"][0] == pytest.approx(values["exact"][0], rel=1e-2)


def test_fault_B21_the_batch_size_hardly_moves_bf16_log_probabilities():
    team = AgentTeam("builtin:tiny", num_agents=1, dtype="bfloat16").load()
    generator = torch.Generator().manual_seed(0)
    responses = [torch.randint(3, 259, (10 + 20 * i,), generator=generator).tolist() for i in range(8)]
    prompts = [[0, *range(5, 6 + i)] for i in range(8)]
    with torch.no_grad():
        together = team.response_logps(0, collate_rows(prompts, responses, 2))
        alone = torch.cat(
            [team.response_logps(0, collate_rows([p], [r], 2)) for p, r in zip(prompts, responses, strict=True)]
        )
    gap = ((together - alone) / alone).abs().max().item()
    assert gap < 2e-3, gap


def test_one_agent_is_reference_free_dpo():
    team = AgentTeam("builtin:tiny", num_agents=1, dtype="float64").load()
    module, _ = make_module(team, score_last_token=True)
    batch = pair_batch()
    single = PairBatch(batch.agents[:1], batch.weights, batch.loss_scale, batch.candidate_reward_means)
    # DPO with the reference cancelled: -log sigmoid(beta * (log pi(w) - log pi(l)))
    expected = 0.0
    for row in range(3):
        winner = literal_logp(team, 0, PROMPTS[row][0], WINNERS[row][0], True)
        loser = literal_logp(team, 0, PROMPTS[row][0], LOSERS[row][0], True)
        expected -= logsigmoid(BETA * (winner - loser)).item() / 3
    assert abs(module.training_step(single, 0).item() - expected) < 1e-9


def test_fault_B35_rows_of_weight_zero_and_split_batches_change_nothing():
    team = make_team()
    module, _ = make_module(team)
    whole, expected = step_gradients(module, team, [pair_batch()])
    parts = [
        pair_batch(rows=(0, 1), loss_scale=1 / 3),
        pair_batch(rows=(2, 0), weights=[1.0, 0.0], loss_scale=1 / 3),
    ]
    split, gradients = step_gradients(module, team, parts)
    assert abs(whole - split) < 1e-12
    for agent in range(2):
        for name, gradient in gradients[agent].items():
            torch.testing.assert_close(gradient, expected[agent][name], rtol=1e-9, atol=1e-12)


def test_logged_numbers():
    team = make_team()
    module, logged = make_module(team)
    module.training_step(pair_batch(), 0)
    margins = []
    for row in range(3):
        margin = 0.0
        for agent in range(2):
            with torch.no_grad():
                margin += literal_logp(team, agent, PROMPTS[row][agent], WINNERS[row][agent], False).item()
                margin -= literal_logp(team, agent, PROMPTS[row][agent], LOSERS[row][agent], False).item()
        margins.append(margin)
    assert abs(logged["train/margin"].item() - sum(margins) / 3) < 1e-9
    assert abs(logged["train/preference_accuracy"].item() - sum(m > 0 for m in margins) / 3) < 1e-6
    assert logged["turn_1/reward_mean"] == logged["turn_1/expected_return"] == 0.5


def test_empty_responses_count_as_zero():
    team = make_team()
    agents = [collate_rows([[0, 5], [0, 5]], [[], [7]], 1), collate_rows([[0, 5], [0, 5]], [[7, 8], []], 1)]
    module, logged = make_module(team)
    loss = module.training_step(PairBatch(agents, torch.ones(1), 1.0, torch.zeros(1)), 0)
    # Agent 0 has no scored token on either side, agent 1 only the winner's first.
    with torch.no_grad():
        expected = literal_logp(team, 1, [0, 5], [7, 8], False)
    assert abs(logged["train/margin"].item() - expected.item()) < 1e-9
    loss.backward()


def test_a_non_finite_loss_stops_before_the_weights_change():
    team = make_team()
    module, _ = make_module(team)
    earlier = copy.deepcopy(team.state_dict())
    with torch.no_grad():
        next(iter(team.agent_parameters(1).values())).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="agent 1's log-probabilities"):
        module.training_step(pair_batch(), 0)
    untouched = {name: value for name, value in team.state_dict().items() if not value.isnan().any()}
    assert all(torch.equal(value, earlier[name]) for name, value in untouched.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dpo_beta": 0.0}, "`dpo_beta` must be > 0"),
        ({"num_train_epochs": 0}, "`num_train_epochs` must be >= 1"),
        ({"num_iterations": 0, "learning_rate": -1.0}, "`num_iterations` must be >= 1.*`learning_rate` must be > 0"),
        ({"weight_decay": -0.1}, "`weight_decay` must be >= 0"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(ValueError, match=message):
        MADPOModule(AgentTeam("builtin:tiny", num_agents=2), **options)
