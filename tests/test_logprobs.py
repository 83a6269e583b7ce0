"""Log-probabilities against a literal reference: full logits, one row and one token at a time."""

import math
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import ARCHITECTURES, assert_close, count_layer_forwards, make_batch, tiny
from pbrl_lightning.agents.adapters import LoraOptions, adapter_active
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.agents.logprobs import response_logps, scored_tokens
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import TokenBatch

PROMPTS = [[0, 40], [0, *range(60, 110)], [5], [0, 7, 99]]
RESPONSES = [[9, 200, 1], [30, 31], [44, 45, 46, 47, 48, 49, 1], [1]]


def sequence_logps(model, batch, **options):
    return response_logps(model, batch, **options).sums


def plain_contexts():
    return nullcontext(), nullcontext()


def reference(model, prompts, responses, score_last_token=True) -> list[float]:
    """Nats by Python floats: every row alone, no padding, no mask, log-softmax spelled out."""
    sums = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].tolist()
        total = 0.0
        scored = response if score_last_token else response[:-1]
        for index, token in enumerate(scored):
            row = logits[len(prompt) + index - 1]
            top = max(row)
            total += row[token] - top - math.log(math.fsum(math.exp(value - top) for value in row))
        sums.append(total)
    return sums


@pytest.mark.parametrize("score_last_token", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logps_equal_the_literal_ones(architecture, dtype, tolerance, score_last_token):
    model = tiny(architecture, dtype)
    expected = torch.tensor(reference(model, PROMPTS, RESPONSES, score_last_token), dtype=dtype)
    if architecture == "gemma2" and dtype == torch.float64:
        tolerance = 1e-6  # its attention takes the softmax in float32, whatever the dtype

    def logps(batch: TokenBatch):
        return sequence_logps(model, batch, score_last_token=score_last_token)

    batched = logps(make_batch(PROMPTS, RESPONSES))
    assert batched.dtype == dtype
    assert_close(batched, expected, tolerance)
    assert_close(logps(make_batch(PROMPTS, RESPONSES, extra_padding=9)), expected, tolerance)
    alone = [logps(make_batch([p], [r])) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert_close(torch.cat(alone), expected, tolerance)
    assert len({round(value, 3) for value in expected.tolist()}) == 4  # they do differ


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fault_B01_pad_equal_to_eos_changes_nothing(architecture):
    model = tiny(architecture)
    prompts, responses = [[0, 1, 40, 1], [0, 9]], [[50, 1], [60, 61, 62, 1]]  # EOS in prompts and at the end
    expected = torch.tensor(reference(model, prompts, responses), dtype=torch.float64)
    tolerance = 1e-6 if architecture == "gemma2" else 1e-9
    for pad_id in (1, 2, 258):
        model.config.pad_token_id = pad_id
        batch = make_batch(prompts, responses, pad_id=pad_id, extra_padding=3)
        assert_close(sequence_logps(model, batch), expected, tolerance)
    model.config.pad_token_id = None
    assert_close(sequence_logps(model, make_batch(prompts, responses, pad_id=0)), expected, tolerance)
    # And EOS does count: without it the value is another.
    without = sequence_logps(model, make_batch(prompts, responses, pad_id=1), score_last_token=False)
    assert ((without - expected) > 0.1).all()


def test_fault_B33_padding_leaks_into_nothing():
    model = tiny("gpt2")
    batch = make_batch(PROMPTS, RESPONSES, extra_padding=4)
    other = torch.where(batch.attention_mask, batch.input_ids, torch.full_like(batch.input_ids, 177))
    gradients = []
    for ids in (batch.input_ids, other):
        model.zero_grad()
        values = sequence_logps(model, TokenBatch(ids, batch.attention_mask, batch.response_mask))
        values.square().sum().backward()
        gradients.append([values.detach(), *[parameter.grad for parameter in model.parameters()]])
    for first, second in zip(*gradients, strict=True):
        assert_close(first, second, 1e-9)


def test_scored_tokens_by_hand():
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert scored_tokens(mask, True).equal(mask)
    expected = [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert scored_tokens(mask, False).int().tolist() == expected


@pytest.mark.parametrize("checkpointing", [None, plain_contexts])
def test_rows_without_scored_tokens_give_zero_and_a_backward(checkpointing):
    model = tiny("llama")
    prompts, responses = [[0, 4], [0, 5, 6]], [[9], [1]]
    values = sequence_logps(model, make_batch(prompts, responses), score_last_token=False, layer_context=checkpointing)
    assert values.tolist() == [0.0, 0.0]
    values.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    mixed = sequence_logps(model, make_batch(prompts, [[9], [7, 1]]), score_last_token=False)
    assert mixed[0] == 0
    assert mixed[1] < -0.01


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_fault_B45_chunks_equal_one_forward_gradients_too(architecture, chunk):
    model = tiny(architecture)
    batch = make_batch(PROMPTS, RESPONSES)
    results = []
    for budget in (2**25, chunk * 259 + 7):
        model.zero_grad()
        values = sequence_logps(model, batch, logit_budget=budget)
        (values * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
        results.append((values.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    assert_close(results[1][0], results[0][0])
    for first, second in zip(results[0][1], results[1][1], strict=True):
        assert_close(second, first)
    with torch.no_grad():
        assert_close(sequence_logps(model, batch, logit_budget=chunk * 259), results[0][0])


def test_fault_B45_logits_stay_within_the_budget_at_any_vocabulary():
    vocabulary, budget = 150_000, 2**21
    model, sizes = tiny("gpt2", torch.float32, vocab_size=vocabulary, n_embd=8, n_head=2), []
    model.lm_head.register_forward_hook(lambda _m, _a, output: sizes.append(output.numel()))
    prompts = [[0, *range(3, 23)]] * 6
    responses = [list(range(100 * row, 100 * row + 30)) for row in range(1, 7)]
    batch = make_batch(prompts, responses)
    values = sequence_logps(model, batch, logit_budget=budget)
    assert max(sizes) <= budget
    assert sum(sizes) == 6 * 30 * vocabulary  # of 6 x 50 positions: none for the prompt
    forward = len(sizes)
    held = saved_bytes(lambda: sequence_logps(model, batch, logit_budget=budget))
    assert held < 2**25  # all logits are 108 MB; parameters apart, the graph keeps none of them
    sizes.clear()
    values.sum().backward()
    assert max(sizes) <= budget
    assert len(sizes) == forward  # recomputed once, chunk by chunk


def saved_bytes(run) -> int:
    """Bytes of what autograd keeps for the backward of ``run()``, each storage once, parameters left out."""
    storages = {}

    def keep(tensor):
        if not isinstance(tensor, nn.Parameter) and tensor._base is None:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storages.values())


class Rejects(nn.Module):
    """A causal LM that takes two arguments and shows no decoder."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


class Swallows(Rejects):
    """Takes everything, uses two arguments."""

    def forward(self, input_ids, attention_mask=None, **_unused):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)


@pytest.mark.parametrize("wrapper", [Rejects, Swallows])
@pytest.mark.parametrize("budget", [2**25, 300])
def test_fault_B46_B47_wrappers_with_other_signatures(wrapper, budget):
    """Prompt lengths 1 and 51: a slice that is off by one or by the prompt would show."""
    model = wrapper(tiny("gpt2"))
    expected = torch.tensor(reference(model.inner, PROMPTS, RESPONSES), dtype=torch.float64)
    values = sequence_logps(model, make_batch(PROMPTS, RESPONSES), logit_budget=budget)
    assert_close(values, expected)
    values.sum().backward()
    wrapped = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sequence_logps(model.inner, make_batch(PROMPTS, RESPONSES)).sum().backward()
    for first, second in zip(wrapped, model.parameters(), strict=True):
        assert_close(first, second.grad)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fault_B32_checkpointing_is_active_in_eval_mode_and_gradients_are_equal(architecture):
    model = tiny(architecture)
    calls, batch, gradients, counts = count_layer_forwards(model), make_batch(PROMPTS, RESPONSES), [], []
    sequence_logps(model, batch)  # tries packing, once
    for context in (None, plain_contexts):
        model.zero_grad()
        calls.clear()
        loss = sequence_logps(model, batch, layer_context=context).square().mean()
        forward = len(calls)
        loss.backward()
        counts.append((forward, len(calls) - forward))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert not any(module.training for module in model.modules())
    assert counts == [(2, 0), (2, 2)]  # two layers: every one again in the backward
    for first, second in zip(*gradients, strict=True):
        assert_close(second, first, 1e-9)


def lora_team(base, checkpointing: bool, **lora) -> AgentTeam:
    """Two adapters on a tiny model, both far from zero and different."""
    team = AgentTeam(
        base,
        num_agents=2,
        tokenizers=tiny_tokenizer(),
        lora=LoraOptions(r=3, alpha=6, **lora),
        gradient_checkpointing=checkpointing,
    ).load()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for agent in range(2):
            for parameter in team.agent_parameters(agent).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2)
    return team


def joint_gradients(team: AgentTeam, others: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Both forwards, then one backward of a loss that couples the agents (or of one agent's alone)."""
    team.zero_grad()
    batches = [make_batch(PROMPTS, RESPONSES), make_batch(PROMPTS[::-1], RESPONSES[::-1])]
    values = [team.response_logps(agent, batch) for agent, batch in enumerate(batches)]
    if others is not None:
        values = [value if agent == others else value.detach() for agent, value in enumerate(values)]
    torch.tanh(sum(values) / 50).sum().backward()
    return [
        {name: p.grad.clone() for name, p in team.agent_parameters(agent).items() if p.grad is not None}
        for agent in range(2)
    ]


@pytest.mark.parametrize("target_modules", [None, ["q_proj", "down_proj"]])
def test_fault_B51_joint_backward_of_two_adapters_with_checkpointing(target_modules):
    results = []
    for checkpointing in (False, True):
        team = lora_team(tiny("llama"), checkpointing, target_modules=target_modules)
        joint_gradients(team)  # tries packing, once
        calls = count_layer_forwards(team)
        results.append(joint_gradients(team))
        # 2 agents x 2 layers, once more in the backward; without checkpoints the last one is asked for its keys first.
        assert len(calls) == (8 if checkpointing else 6)
        frozen = [p for name, p in team.named_parameters() if "lora_" not in name]
        assert frozen
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in frozen)
        if checkpointing:
            # One agent alone: the other's margin detached gives the same gradient, and none for the other.
            alone = joint_gradients(team, others=0)
            assert alone[1] == {}
            for name, gradient in alone[0].items():
                assert_close(gradient, results[1][0][name])
    for plain, recomputed in zip(*results, strict=True):
        assert plain.keys() == recomputed.keys()
        assert plain
        for name in plain:
            assert plain[name].abs().max() > 1e-6, name
            assert_close(recomputed[name], plain[name], 1e-9)


def test_adapters_on_the_head_are_recomputed_with_their_own_weights(monkeypatch):
    """Logits in several chunks are computed again in the backward, after the other agent's forward."""
    gradients = []
    for budget in (2**25, 300):
        monkeypatch.setattr("pbrl_lightning.agents.team.response_logps", with_budget(budget))
        gradients.append(joint_gradients(lora_team(tiny("llama"), False, target_modules=["lm_head", "q_proj"])))
    for plain, chunked in zip(*gradients, strict=True):
        assert any("lm_head" in name for name in plain)
        assert plain.keys() == chunked.keys()
        for name in plain:
            assert_close(chunked[name], plain[name])


def with_budget(budget: int):
    return lambda *args, **options: response_logps(*args, **options, logit_budget=budget)


def test_an_adapter_scores_as_plain_peft_does():
    team = lora_team(tiny("llama"), False)
    values = [team.response_logps(agent, make_batch(PROMPTS, RESPONSES)).detach() for agent in range(2)]
    assert (values[0] - values[1]).abs().max() > 0.01
    for agent in range(2):
        config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        with pytest.warns(FutureWarning):  # PEFT's own, of a renamed attribute
            plain = get_peft_model(tiny("llama"), config)
        own = {name.replace(f".agent_{agent}.", ".default."): p for name, p in team.agent_parameters(agent).items()}
        state = plain.state_dict()
        assert own.keys() <= state.keys()
        plain.load_state_dict({**state, **own})
        expected = torch.tensor(reference(plain.eval(), PROMPTS, RESPONSES), dtype=torch.float64)
        assert_close(values[agent], expected)


def test_adapter_active_nests_and_survives_errors():
    team = lora_team(tiny("llama"), False)
    layers = [module for module in team.modules() if hasattr(module, "lora_A")]

    def active() -> set[str]:
        return {name for layer in layers for name in layer.active_adapters}

    before = active()
    grads = [parameter.requires_grad for parameter in team.parameters()]

    def fail_inside() -> None:
        with adapter_active(team.backbone(0), "agent_1"):
            with team.active(0):
                assert active() == {"agent_0"}
            assert active() == {"agent_1"}
            assert [parameter.requires_grad for parameter in team.parameters()] == grads
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert active() == before


@pytest.mark.parametrize("call_train", [False, True])
def test_fault_B31_dropout_is_off_even_after_train(call_train):
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    plain = tiny("gpt2", **dropout)
    expected = torch.tensor(reference(plain, PROMPTS, RESPONSES), dtype=torch.float64)
    batch = make_batch(PROMPTS, RESPONSES)
    with torch.random.fork_rng():
        noisy = sequence_logps(tiny("gpt2", **dropout).train(), batch)
    assert (noisy - expected).abs().max() > 1e-3  # this model's dropout does show
    team = AgentTeam([tiny("gpt2", **dropout).train()], tokenizers=tiny_tokenizer(), gradient_checkpointing=True)
    holder = nn.ModuleDict({"team": team.load()})
    if call_train:
        holder.train()
    assert not any(module.training for module in team.backbones[0].modules())
    for _ in range(2):
        assert_close(team.response_logps(0, batch), expected)
    assert_close(team.frozen_copy().train().response_logps(0, batch), expected)


def test_fault_B20_bf16_weights_sum_in_float32():
    model = tiny("llama", torch.bfloat16)
    exact = tiny("llama", torch.float32)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    generator = torch.Generator().manual_seed(0)
    responses = [torch.randint(3, 259, (400,), generator=generator).tolist() for _ in range(3)]
    batch = make_batch([[0, 4]] * 3, responses)
    values, expected = sequence_logps(model, batch), sequence_logps(exact, batch)
    assert values.dtype == torch.float32
    assert torch.isfinite(values).all()
    assert_close(values, expected, 1e-2)
    # A bfloat16 sum of 400 terms near -6 could only be a multiple of 16.
    assert (values % 16 != 0).any()
    values.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_fault_B21_bf16_gap_between_batch_sizes_is_small():
    model = tiny("llama", torch.bfloat16)
    together = sequence_logps(model, make_batch(PROMPTS, RESPONSES))
    alone = torch.cat([sequence_logps(model, make_batch([p], [r])) for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    assert_close(together, alone, 1e-2)


def test_models_without_layers_to_checkpoint_are_named():
    with pytest.raises(ValueError, match=r"Linear has no checkpointable layers.*gradient_checkpointing=False"):
        sequence_logps(nn.Linear(2, 2), make_batch(PROMPTS, RESPONSES), layer_context=plain_contexts)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any tensor had that was made inside."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return result


@pytest.mark.slow
def test_memory_is_bounded_in_a_vocabulary_of_150_000():
    vocabulary = 151_936
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompts, responses = [[5, 6, 7]] * 8, [[index * 17 + place * 1001 for place in range(60)] for index in range(8)]
    budget = 12 * vocabulary  # rather than 480 rows of them
    with LargestTensor() as largest:
        summed = sequence_logps(model, make_batch(prompts, responses), logit_budget=budget)
        summed.sum().backward()
    assert vocabulary < largest.most <= budget
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    whole = sequence_logps(model, make_batch(prompts, responses), logit_budget=10**9)
    whole.sum().backward()
    assert_close(summed, whole)
    assert_close(gradient, model.lm_head.weight.grad, 1e-4)
