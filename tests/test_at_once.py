"""Agents of full models compute at the same time on a CPU: the same numbers, and gradients where they belong."""

import os
import signal
import threading
import time

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers import tiny, tiny_tokenizer
from pbrl_lightning import AgentTeam, AttachedCritics, LoraOptions, MADPOModule, MARLModule, ReferenceKL
from pbrl_lightning.agents import at_once
from pbrl_lightning.agents.at_once import for_each_agent, in_threads
from pbrl_lightning.batches import PairBatch, RolloutBatch
from pbrl_lightning.preferences.pair_tokens import collate_rows
from training_runs import perturb

PROMPTS = [[5, 9, 2], [7, 7]]
SAID = [[3, 1, 4, 1], [5, 9], [2, 6, 5], [3, 5, 8, 9]]


@pytest.fixture
def threads_seen(monkeypatch):
    seen = []
    original = AgentTeam.score_responses

    def spied(self, agent, *args, **kwargs):
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return original(self, agent, *args, **kwargs)

    monkeypatch.setattr(AgentTeam, "score_responses", spied)
    return seen


def full_team(**options):
    return perturb(AgentTeam("builtin:tiny", num_agents=3, **options).load().to(torch.float64), 5, 0.3)


def rows(agent):
    said = SAID[agent:] + SAID[:agent]
    return collate_rows([*PROMPTS, *PROMPTS], said, 0)


def pair_batch():
    return PairBatch([rows(agent) for agent in range(3)], torch.ones(2), 0.5, torch.zeros(2))


def rollout_batch(old_values=None):
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    returns = rewards.expand(3, 4)
    batch = [rows(agent) for agent in range(3)]
    return RolloutBatch(batch, returns - 1, returns, torch.ones(4), 0.25, 2, rewards, [], old_values)


def gradients(module, batch, times=1):
    for _ in range(times):
        loss, _ = module.step(batch, "batch 0")
        loss.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    for parameter in module.parameters():
        parameter.grad = None
    return loss.detach(), found


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def madpo():
    return MADPOModule(full_team()), pair_batch()


def recomputed():
    return MADPOModule(full_team(gradient_checkpointing=True)), pair_batch()


def policy():
    return MARLModule(full_team(), num_generations=2), rollout_batch()


def attached_critics():
    module = MARLModule(full_team(), rl_algorithm="iac", critic=AttachedCritics(), num_generations=2)
    module.load()
    return module, rollout_batch(torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("case", [madpo, recomputed, policy, attached_critics])
@pytest.mark.parametrize("times", [1, 3])
def test_what_two_threads_find_together_one_thread_finds(case, times, threads_seen):
    module, batch = case()
    alone = gradients(module, batch, times)  # the suite runs with one thread
    assert {thread for thread, _ in threads_seen} == {threading.get_ident()}
    threads_seen.clear()
    torch.set_num_threads(2)
    try:
        together = gradients(module, batch, times)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert {threads for _, threads in threads_seen} == {1}
    assert threading.get_ident() not in {thread for thread, _ in threads_seen}
    # Each agent had one thread both times: bit for bit the same, gradients that accumulate too.
    assert_same(alone, together)
    assert len(alone[1]) == sum(parameter.requires_grad for parameter in module.parameters())


def test_models_with_one_configuration_take_turns(two_threads, threads_seen):
    """An attention is exchanged by way of the configuration, and each would see the other's."""
    config = tiny("llama").config
    models = [LlamaForCausalLM(config).double().eval() for _ in range(2)]
    assert models[0].config is models[1].config
    team = AgentTeam(models, tokenizers=tiny_tokenizer()).load()
    for_each_agent(team, lambda agent: (team.response_logps(agent, rows(agent)),))
    assert {thread for thread, _ in threads_seen} <= {threading.get_ident()}
    assert at_once._separate_models(full_team()) == 3
    assert at_once._separate_models(team) == 1


def test_gradients_of_chosen_weights(two_threads):
    module = MADPOModule(full_team())
    loss, _ = module.step(pair_batch(), "batch 0")
    weights = [module.team.model(agent).get_input_embeddings().weight for agent in range(3)]
    found = torch.autograd.grad(loss, weights)
    assert all(weight.grad is None for weight in weights)
    expected = gradients(module, pair_batch())[1]
    for agent, gradient in enumerate(found):
        names = [name for name in expected if f"backbones.{agent}." in name and "embed_tokens" in name]
        assert [torch.equal(gradient, expected[name]) for name in names] == [True]


def test_the_backwards_too_are_in_threads(two_threads):
    team, seen = full_team(), set()
    for agent in range(3):
        team.model(agent).base_model.norm.register_full_backward_hook(
            lambda *_args: seen.add((threading.get_ident(), torch.get_num_threads()))
        )
    gradients(MADPOModule(team), pair_batch())
    assert {threads for _, threads in seen} == {1}
    assert threading.get_ident() not in {thread for thread, _ in seen}


def test_a_new_thread_keeps_the_modes_of_the_one_that_asks(two_threads):
    team = full_team()

    def modes(agent):
        del agent
        logits = torch.ones(2, 2) @ torch.ones(2, 2)
        return (torch.tensor(torch.is_grad_enabled()), logits)

    assert {bool(on) for on, _ in for_each_agent(team, modes)} == {True}
    with torch.no_grad():
        assert {bool(on) for on, _ in for_each_agent(team, modes)} == {False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {product.dtype for _, product in for_each_agent(team, modes)} == {torch.bfloat16}
    assert {product.dtype for _, product in for_each_agent(team, modes)} == {torch.float32}


def test_one_agent_is_left_out_of_a_loss(two_threads):
    team = full_team()
    sums = for_each_agent(team, lambda agent: (team.response_logps(agent, rows(agent)),))
    (sums[0][0].sum() + sums[2][0].sum()).backward()
    # What autograd fills up is zero.
    moved = {agent for agent in range(3) if any(p.grad.any() for p in team.model(agent).parameters())}
    assert moved == {0, 2}


def test_an_error_of_one_agent_comes_out_and_the_threads_are_given_back(two_threads):
    team = full_team()
    with torch.no_grad():
        team.model(1).get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="agent 1's log-probabilities"):
        MADPOModule(team).step(pair_batch(), "batch 0")
    with pytest.raises(ZeroDivisionError):
        in_threads([lambda: 1 / 0, lambda: 1.0], 2)
    assert torch.get_num_threads() == 2


def test_a_task_comes_back_to_its_thread_and_a_forked_child_gets_threads_of_its_own(two_threads):
    first = in_threads([threading.get_ident] * 3, 2)
    assert in_threads([threading.get_ident] * 3, 2) == first
    assert first[0] == first[2] != first[1]
    child = os.fork()
    if not child:
        os._exit(in_threads([lambda: 1, lambda: 2, lambda: 3], 2) != [1, 2, 3])
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)


def test_agents_on_one_backbone_and_several_processes_take_turns(two_threads, threads_seen, monkeypatch):
    shared = AgentTeam("builtin:tiny", num_agents=3, lora=LoraOptions(r=2)).load()
    gradients(MADPOModule(shared), pair_batch())
    assert {*threads_seen} == {(threading.get_ident(), 2)}
    threads_seen.clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert at_once._separate_models(full_team()) == 1


def test_the_kl_to_the_reference_and_the_old_values(two_threads):
    module = MARLModule(full_team(), reference_kl=ReferenceKL(), num_generations=2)
    module.load()
    perturb(module.team, 3, 0.05)
    batch = [rows(agent) for agent in range(3)]
    kls, clamped = module.kl_to_reference(batch)
    torch.set_num_threads(1)
    expected, none = module.kl_to_reference(batch)
    assert torch.equal(kls, expected)
    assert torch.equal(clamped, none)
    assert bool((kls > 0).all())
