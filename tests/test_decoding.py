"""Decoding with shared prompts, and with ready matrix products, is decoding as usual."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import ARCHITECTURES, assert_close, tiny
from pbrl_lightning import AgentTeam, LoraOptions, SamplingConfig
from pbrl_lightning.acceleration.precision import is_emulated
from pbrl_lightning.agents import answering, decoding, products, sampling
from pbrl_lightning.agents.decoding import DecodedRows, SharingRows, rows_for
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.agents.products import ready_products
from pbrl_lightning.randomness import counted_uniforms
from training_runs import perturb

PROMPTS = [[0, 40, 12], [0, 7, 99, 140, 31, 8, 66], [5]]


def steps(kind, model, source, kept_after=2):
    """Logits of every step; after two of them rows leave, so that prompts have unequal numbers of rows, or none."""
    rows = kind(model, PROMPTS, torch.tensor(source), 6)
    found = [rows.logits]
    for step in range(5):
        if step == kept_after:
            kept = torch.tensor([row for row in range(len(source)) if row % 3 != 1 and source[row] != 2])
            rows.keep(kept)
            assert len(rows.positions) == len(kept)
            found[-1] = found[-1][kept]
        rows.step((torch.arange(len(found[-1])) * 7 + step) % 90 + 3)
        found.append(rows.logits)
    return torch.cat(found)


@pytest.mark.parametrize("source", [[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 1, 2, 2], [0, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_rows_that_share_a_prompt_have_the_logits_of_rows_of_their_own(architecture, dtype, source):
    wide = {"sliding_window": 128} if architecture == "gemma2" else {}
    model = tiny(architecture, dtype, **wide)
    if architecture == "gemma2" and dtype != torch.bfloat16:
        model = model.float()  # its float64 cannot be padded on the left, see `tiny`
    expected, found = steps(DecodedRows, model, source), steps(SharingRows, model, source)
    scale = expected.abs().max() if dtype == torch.bfloat16 else 1.0
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.08}[model.dtype]
    assert_close(found.double() / scale, expected.double() / scale, tolerance)
    assert rows_for(model, 40) is SharingRows


def test_what_cannot_share_is_decoded_row_by_row():
    assert rows_for(tiny("gemma2", torch.float32), 40) is DecodedRows  # its window is shorter than that
    assert rows_for(tiny("gemma2", torch.float32), 8) is SharingRows

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny("llama")

    assert rows_for(Wrapper(), 40) is DecodedRows


def test_a_model_that_shares_wrongly_is_found_out(monkeypatch):
    def forgets_the_prompt(module, query, key, value, attention_mask, scaling=None, **_):
        scores = (query * scaling) @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
        heard = scores.softmax(-1) @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return heard.transpose(1, 2), None

    model = tiny("llama")
    monkeypatch.setitem(decoding.AttentionInterface._global_mapping, decoding._ATTENTION, forgets_the_prompt)
    assert rows_for(model, 40) is DecodedRows
    monkeypatch.undo()
    assert rows_for(model, 40) is DecodedRows  # looked at once
    assert rows_for(tiny("llama"), 40) is SharingRows


def test_the_attention_is_given_back_even_after_an_error():
    model = tiny("llama")
    before = model.config._attn_implementation
    rows = SharingRows(model, PROMPTS, torch.tensor([0, 1, 2]), 4)
    with pytest.raises(IndexError):
        rows.step(torch.full((3,), 10**6))
    assert model.config._attn_implementation == before


def test_the_cache_of_shared_prompts_does_not_grow_with_the_rows():
    model = tiny("llama")

    def held(kind, count):
        rows = kind(model, [list(range(3, 103))], torch.zeros(count, dtype=torch.long), 4)
        tensors = [x for layer in rows.cache.layers for x in (*layer._memory, getattr(layer, "prompt_keys", None))]
        return sum(x.numel() for x in tensors if x is not None)

    assert held(DecodedRows, 32) > 16 * held(DecodedRows, 2) * 0.99
    assert held(SharingRows, 32) < held(SharingRows, 2) * 4


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_ready_products_are_the_products(every_size, dtype, bias):
    layer = nn.Linear(48, 80, bias=bias).to(dtype)
    inputs = torch.randn(5, 3, 48).to(dtype)
    with ready_products(layer):
        assert ("forward" in layer.__dict__) == (dtype != torch.float64)
        found = layer(inputs)
    assert "forward" not in layer.__dict__
    assert found.dtype == dtype
    assert found.shape == (5, 3, 80)
    assert_close(found, layer(inputs))


@torch.no_grad()
def test_products_in_bfloat16_round_inputs_and_weights_and_nothing_else(every_size):
    layer, inputs = nn.Linear(48, 80), torch.randn(5, 48)
    with ready_products(layer, torch.bfloat16):
        found = layer(inputs)
    assert found.dtype == torch.float32
    rounded = [x.bfloat16().double() for x in (inputs, layer.weight, layer.bias)]
    assert_close(found, F.linear(*rounded).float(), 1e-2)
    assert not torch.equal(found, layer(inputs))


def test_only_plain_linear_layers_of_some_size_are_made_ready(every_size, monkeypatch):
    class Own(nn.Linear):
        pass

    layers = nn.Sequential(nn.Linear(8, 8), Own(8, 8), nn.Linear(8, 8).double())
    with ready_products(layers):
        assert ["forward" in layer.__dict__ for layer in layers] == [True, False, False]
    monkeypatch.setattr(products, "SMALLEST", 65)
    with ready_products(layers):
        assert not any("forward" in layer.__dict__ for layer in layers)
    monkeypatch.setattr(products, "SMALLEST", 1)
    monkeypatch.setattr(products, "device_memory", lambda _device: 4 * 8 * 8 * 4)  # a quarter is the layer's own size
    with ready_products(layers):
        assert not any("forward" in layer.__dict__ for layer in layers)


@torch.no_grad()
def test_a_model_too_large_to_copy_still_multiplies_in_the_precision_asked_for(every_size, monkeypatch):
    layer, inputs = nn.Linear(48, 80), torch.randn(5, 48)
    monkeypatch.setattr(products, "device_memory", lambda _device: 0)
    with ready_products(layer, torch.bfloat16):
        assert "forward" not in layer.__dict__
        assert layer(inputs).dtype == torch.bfloat16
    with ready_products(layer):
        assert layer(inputs).dtype == torch.float32


@torch.no_grad()
def test_what_sampling_leaves_in_a_model_can_be_trained_with():
    """Rotary frequencies that grow with the text are stored while sampling, which runs in inference mode."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    uniforms = [counted_uniforms(2, 12, 0, "actors")]
    sampling.sample_responses(model, [[1, 2, 3, 4]], uniforms, SamplingConfig(max_new_tokens=12), set())
    with torch.enable_grad():
        model(torch.arange(20)[None]).logits.square().sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)])
def test_sampling_uses_ready_products_and_gives_the_same_tokens(every_size, monkeypatch, lora):
    team = AgentTeam("builtin:tiny", num_agents=2, lora=lora).load()
    perturb(team, 1, 0.3)
    used = []
    options = {"num_candidates": 3, "sampling": SamplingConfig(max_new_tokens=8), "seed": 1, "stream": "actors"}
    original = products._ready_linear
    monkeypatch.setattr(products, "_ready_linear", lambda *a, **k: used.append(1) or original(*a, **k))
    items = [{"prompt": "one"}, {"prompt": "another one"}]
    ready = team.sample(items, [0, 1], **options)
    assert used
    monkeypatch.setattr(products, "SMALLEST", 10**9)
    assert team.sample(items, [0, 1], **options) == ready
    # Weights that change are seen by the next call.
    monkeypatch.setattr(products, "SMALLEST", 1)
    with torch.no_grad():
        for parameter in team.parameters():
            parameter.mul_(1.5)
    assert team.sample(items, [0, 1], **options) != ready


def lora_team(**options):
    return perturb(AgentTeam("builtin:tiny", num_agents=3, lora=LoraOptions(r=2, **options)).load().double(), 2, 0.5)


def options_of(**changes):
    sampling = {"temperature": 1.3, "top_p": 1.0, "top_k": None, "max_new_tokens": 12, **changes}
    return {"num_candidates": 4, "sampling": SamplingConfig(**sampling), "seed": 3, "stream": "actors"}


ITEMS = [{"prompt": "a first prompt of some length"}, {"prompt": "b"}]


@pytest.mark.parametrize("token_budget", [None, 70])
def test_agents_on_one_backbone_in_one_batch_say_what_each_says_alone(token_budget, monkeypatch):
    team, options = lora_team(), options_of(token_budget=token_budget)
    for agent in range(3):
        team.eos_ids(agent).update(range(200, 240))  # so that rows leave

    def state():
        return [(name, len(m._forward_pre_hooks), getattr(m, "_active_adapter", 0)) for name, m in team.named_modules()]

    before = state()
    together = team.sample(ITEMS, [4, 9], **options)
    assert state() == before
    alone = [team.answer(agent, team.formatters[agent], ITEMS, [4, 9], **options) for agent in range(3)]
    for row, sample in enumerate(together):
        assert sample.responses == [alone[agent][row].responses for agent in range(3)]
        assert sample.prompt_ids == [alone[agent][row].prompt_ids for agent in range(3)]
    lengths = {len(said.token_ids) for sample in together for rows in sample.responses for said in rows.values()}
    assert len(lengths) > 2
    # The agents differ, and each is asked with its own uniforms.
    assert len({str(rows) for rows in together[0].responses}) == 3


def forwards(team, **options):
    rows_for(team.model(0), 60)
    rows, embedding = [], team.model(0).get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
    team.sample(ITEMS, [0, 1], **options)
    hook.remove()
    return rows


def test_agents_share_a_batch_where_their_adapters_can_be_mixed():
    assert max(forwards(lora_team(), **options_of())) == 3 * 2 * 4
    assert max(forwards(lora_team(target_modules=["q_proj", "lm_head"]), **options_of())) == 2 * 4
    team = lora_team()
    team.eos_ids(1).add(77)  # ends elsewhere
    assert sorted(set(forwards(team, **options_of(max_new_tokens=2)))) == [2, 4, 2 * 4, 2 * 2 * 4]


def test_a_diverged_agent_in_a_shared_batch_is_named_with_the_others():
    team = lora_team()
    with torch.no_grad():
        for parameter in team.agent_parameters(1).values():
            parameter.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"agents 0, 1, 2 of one backbone cannot be sampled \(actors, 0\): .*diverged"):
        team.sample(ITEMS, [0, 1], **options_of())


def test_sampling_in_bfloat16_is_sampling_nearly_the_same_policy(every_size, monkeypatch):
    team, dtypes, original = AgentTeam("builtin:tiny", num_agents=1).load(), [], products._converted

    def converted(inputs, product, dtype):
        dtypes.append((inputs.dtype, dtype))
        return original(inputs, product, dtype)

    monkeypatch.setattr(products, "_converted", converted)
    fast = team.sample(ITEMS, [0, 1], **options_of(dtype="bfloat16"))
    copies = {(torch.bfloat16, torch.float32)} if is_emulated(torch.bfloat16, "cpu") else set()
    assert set(dtypes) == {(torch.float32, torch.bfloat16), (torch.float32, torch.float32)} | copies  # a precise head
    # This model's probabilities are nearly equal, so that few draws lie next to a boundary.
    assert [sample.responses for sample in fast] == [s.responses for s in team.sample(ITEMS, [0, 1], **options_of())]
    with pytest.raises(ValueError, match="`dtype` must be 'bfloat16', 'float16' or null"):
        SamplingConfig(dtype="int8")


def test_the_default_token_budget_is_a_sixteenth_of_the_memory(monkeypatch):
    model = tiny("llama", torch.float32)
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4
    for tokens, expected in ((5000, 5000), (10, 2048), (10**9, 65536)):
        monkeypatch.setattr(sampling, "device_memory", lambda _device, tokens=tokens: 16 * per_token * tokens)
        assert sampling.default_token_budget(model) == expected
    monkeypatch.setattr(sampling, "device_memory", lambda _device: 16 * 2048 * 2 * 2 * 32 * 4096)
    assert sampling.default_token_budget(nn.Linear(2, 2).half()) == 2048  # a model that says nothing of itself


def test_the_rows_of_a_batch_are_bounded_in_the_vocabulary(monkeypatch):
    model, rows = tiny("llama"), []
    rows_for(model, 20)
    monkeypatch.setattr(sampling, "LOGIT_BUDGET", 5 * model.config.vocab_size + 1)
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
    config = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=3)
    uniforms = [counted_uniforms(6, 3, 0, "actors", item=item) for item in range(2)]
    few = sampling.sample_responses(model, PROMPTS[:2], uniforms, config, set())
    assert max(rows) == 5
    monkeypatch.undo()
    assert sampling.sample_responses(model, PROMPTS[:2], uniforms, config, set()) == few


def spied(monkeypatch):
    """The threads that sample, and how many torch threads each has."""
    seen, original = [], answering.sample_responses

    def sample(*args):
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return original(*args)

    monkeypatch.setattr(answering, "sample_responses", sample)
    return seen


def full_team(dtype=torch.float64):
    return perturb(AgentTeam("builtin:tiny", num_agents=3).load().to(dtype), 5, 0.3)


def test_full_models_are_sampled_at_once_and_say_what_each_says_alone(two_threads, monkeypatch):
    team, options = full_team(), options_of()
    seen = spied(monkeypatch)
    together = team.sample(ITEMS, [4, 9], **options)
    assert {threads for _, threads in seen} == {1}
    assert len({thread for thread, _ in seen}) == 2
    assert threading.get_ident() not in {thread for thread, _ in seen}
    assert torch.get_num_threads() == 2
    alone = [team.answer(agent, team.formatters[agent], ITEMS, [4, 9], **options) for agent in range(3)]
    assert {seen[-1], seen[-2], seen[-3]} == {(threading.get_ident(), 2)}
    for row, sample in enumerate(together):
        assert sample.responses == [alone[agent][row].responses for agent in range(3)]
    assert all(model.config._attn_implementation == "sdpa" for model in map(team.model, range(3)))


def test_an_error_in_one_of_them_is_raised_and_the_threads_are_given_back(two_threads):
    team = full_team()
    with torch.no_grad():
        team.model(1).get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"agent 1 cannot be sampled \(actors, 0\)"):
        team.sample(ITEMS, [0, 1], **options_of())
    assert torch.get_num_threads() == 2
    assert all(model.config._attn_implementation == "sdpa" for model in map(team.model, range(3)))


def test_models_that_share_a_configuration_or_fill_the_memory_take_turns(two_threads, monkeypatch):
    team, seen = full_team(), spied(monkeypatch)
    size = sum(parameter.nbytes for parameter in team.model(0).parameters())
    monkeypatch.setattr(answering, "device_memory", lambda _device: 8 * size - 1)
    team.sample(ITEMS, [0, 1], **options_of())
    assert set(seen) == {(threading.get_ident(), 2)}
    monkeypatch.setattr(answering, "device_memory", lambda _device: 8 * size)
    team.sample(ITEMS, [0, 1], **options_of())
    assert {threads for _, threads in seen[3:]} == {1}
    models = [tiny("llama", seed=seed) for seed in range(2)]
    for module in models[1].modules():
        if hasattr(module, "config"):
            module.config = models[0].config
    seen.clear()
    shared = AgentTeam(models, tokenizers=tiny_tokenizer()).load()
    shared.sample(ITEMS, [0, 1], **options_of())
    assert set(seen) == {(threading.get_ident(), 2)}
