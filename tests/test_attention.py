"""Attention of our own: its precision on a CPU, and the trial that compares it with the model's own."""

import math

import pytest
import torch
from torch.nn import functional

from helpers import assert_close, make_batch, tiny
from pbrl_lightning.agents import packing
from pbrl_lightning.agents.attention import attention_of, precision_of_the_model
from pbrl_lightning.agents.logprobs import response_logps

PROMPT = list(range(10, 34))


def batch():
    """Rows that share prompts."""
    return make_batch([PROMPT, PROMPT, [5, 6, 7], PROMPT, [5, 6, 7]], [[40, 41, 42], [43], [44, 45], [46, 47], [48]])


def literal(q, k, v, sees, scale):
    """Token by token and head by head, in float64."""
    heads, tokens, size = q.shape[1:]
    groups = heads // k.shape[1]
    heard = torch.zeros(1, heads, tokens, size, dtype=torch.float64)
    for head in range(heads):
        for token in range(tokens):
            scores = {
                key: math.exp(scale * float(q[0, head, token].double() @ k[0, head // groups, key].double()))
                for key in range(k.shape[2])
                if sees(token, key)
            }
            for key, score in scores.items():
                heard[0, head, token] += score / sum(scores.values()) * v[0, head // groups, key].double()
    return heard


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_of_bfloat16_states_is_computed_in_float32(masked, autocast):
    torch.manual_seed(0)
    tokens, keys = 5, (8 if masked else 5)
    mask = torch.rand(tokens, keys) < 0.5 if masked else None
    if mask is not None:
        mask[:, 0] = True
    low = torch.bfloat16
    # Under autocast queries and keys come from the rotation in float32, values from a product in bfloat16.
    q, k = (torch.randn(1, heads, length, 4) for heads, length in ((4, tokens), (2, keys)))
    q, k = (q, k) if autocast else (q.to(low), k.to(low))
    v = torch.randn(1, 2, keys, 4).to(low)
    with torch.autocast("cpu", low, enabled=autocast):
        found = attention_of(q, k, v, mask, 0.7, None)
    expected = literal(q, k, v, lambda token, key: key <= token if mask is None else bool(mask[token, key]), 0.7)
    assert found.dtype == low
    # Nothing is rounded but the result: with scores or weights in bfloat16 a tenth of its entries would differ.
    differ = found.double() != expected.to(low).double()
    assert differ.float().mean() < 0.02


def test_gradients_of_packed_bfloat16_rows_are_as_close_to_the_exact_ones_as_those_of_plain_rows(monkeypatch):
    model, exact = tiny("llama", torch.bfloat16), tiny("llama", torch.float32)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})

    def gradients(one, packed):
        one.zero_grad()
        found = response_logps(one, batch())
        assert bool(found.layout.spans) == packed
        found.token_logps.sum().backward()
        return torch.cat([parameter.grad.float().flatten() for parameter in one.parameters()])

    packed = gradients(model, packed=True)
    monkeypatch.setattr(packing, "may_exchange_attention", lambda *_: False)
    plain, expected = gradients(model, packed=False), gradients(exact, packed=False)
    assert (packed - expected).norm() <= 1.1 * (plain - expected).norm() < 0.1 * expected.norm()


def test_mixed_precision_packs_and_is_close_to_full_precision():
    model = tiny("llama")
    exact = response_logps(model, batch()).token_logps
    with torch.autocast("cpu", torch.bfloat16):
        mixed = response_logps(model, batch())
    assert mixed.layout.spans
    assert_close(mixed.token_logps.float(), exact, 0.03)


def test_a_trial_compares_in_the_precision_of_the_model():
    """In float32 the states of a real model in bfloat16 would be others, and its rows would not be packed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 16).bfloat16() for heads in (4, 2, 2))
    models_own = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    with precision_of_the_model():
        assert torch.equal(attention_of(q, k, v, None, 0.25, None), models_own)
    assert not torch.equal(attention_of(q, k, v, None, 0.25, None), models_own)


def responses_hear_each_other(self, shared, lengths):
    return torch.ones(sum(lengths), shared + sum(lengths), dtype=torch.bool)


def responses_do_not_hear_what_is_shared(self, shared, lengths):
    own = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()
    return torch.cat([torch.zeros(len(own), shared, dtype=torch.bool), own], 1)


@pytest.mark.parametrize("fault", [responses_hear_each_other, responses_do_not_hear_what_is_shared])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_finds_masks_that_are_not_heeded(monkeypatch, fault, dtype):
    decoder = tiny("llama", dtype).base_model
    with monkeypatch.context() as patched:
        patched.setattr(packing._Masks, "of", fault)
        with pytest.warns(UserWarning, match="does not let its attention be exchanged"):
            layout = packing.lay_out(decoder, batch())
    assert not layout.spans
    assert packing.lay_out(tiny("llama", dtype).base_model, batch()).spans
