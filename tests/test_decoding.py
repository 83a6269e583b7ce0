"""Decoding with shared prompts, and with ready matrix products, is decoding as usual."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import ARCHITECTURES, assert_close, tiny
from pbrl_lightning import AgentTeam, LoraOptions, SamplingConfig
from pbrl_lightning.agents import decoding, products
from pbrl_lightning.agents.decoding import DecodedRows, SharingRows, rows_for
from pbrl_lightning.agents.products import ready_products
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
    monkeypatch.setattr(products, "machine_memory", lambda: 4 * 8 * 8 * 4)  # a quarter is the layer's own size
    with ready_products(layers):
        assert not any("forward" in layer.__dict__ for layer in layers)


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
