"""A last layer for the wanted tokens alone gives the states, log-probabilities and gradients of the whole one."""

import gc

import pytest
import torch
from torch.utils.checkpoint import noop_context_fn

from helpers import ARCHITECTURES, assert_close, live_tensor_bytes, make_batch, tiny
from pbrl_lightning.agents import packing
from pbrl_lightning.agents.last_layer import last_layer_of
from pbrl_lightning.agents.logprobs import response_logps
from pbrl_lightning.agents.packing import lay_out
from pbrl_lightning.models.reward import JointRewardModel

LONG = list(range(10, 50))
PROMPTS = [LONG, LONG, LONG, [5, 6, 7, 8, 9], LONG, [5, 6, 7, 8, 9]]
RESPONSES = [[40, 41, 42], [43], [44, 45], [46, 47], [40, 41, 42], []]
ROWS = make_batch(PROMPTS, RESPONSES, extra_padding=2)
MANY = make_batch([LONG * 4] * 9, [[index + 20] * (4 + 5 * index) for index in range(9)])


def scored(model, rows, with_states):
    model.zero_grad()
    found = response_logps(model, rows, with_states=with_states)
    found.token_logps.sin().sum().backward()
    return found, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rows", [ROWS, MANY], ids=["few", "groups"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt2"])
def test_what_is_narrowed_is_the_same(architecture, rows):
    model = tiny(architecture, **({"sliding_window": 512} if architecture == "gemma2" else {}))
    whole, expected = scored(model, rows, with_states=True)
    narrow, gradients = scored(model, rows, with_states=False)
    assert whole.layout.kept is None
    assert narrow.layout.kept is not None
    assert narrow.decoded.shape[1] == len(narrow.layout.kept) < whole.decoded.shape[1]
    tolerance = 1e-6 if architecture == "gemma2" else 1e-12  # the softmax of Gemma2's attention is float32 in any case
    assert_close(narrow.token_logps, whole.token_logps, tolerance)
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, tolerance)
    with pytest.raises(ValueError, match="with_states"):
        _ = narrow.states


def test_only_wanted_tokens_go_through_the_last_layer():
    decoder, read = tiny("llama").base_model, []
    last = last_layer_of(decoder)
    assert last is decoder.layers[-1]
    last.mlp.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    wanted = torch.zeros_like(ROWS.attention_mask)
    wanted[0, 3] = wanted[1, 3] = wanted[3, 4] = True  # two are one token of a shared prompt
    layout = lay_out(decoder, ROWS, wanted)
    read.clear()
    with layout.reading(decoder):
        states = decoder(**layout.inputs, use_cache=False)[0]
    assert read == [2]
    assert states.shape[1] == 2
    whole = lay_out(decoder, ROWS)
    with whole.reading(decoder):
        everything = decoder(**whole.inputs, use_cache=False)[0]
    assert_close(
        layout.pick(states, *wanted.nonzero(as_tuple=True)), whole.pick(everything, *wanted.nonzero(as_tuple=True))
    )
    assert "forward" not in last.__dict__


def test_a_reward_is_read_from_last_tokens():
    found = []
    for checkpointing in (True, False):
        model = JointRewardModel("builtin:tiny", dtype="float64", gradient_checkpointing=checkpointing).load()
        scores = model(ROWS)
        scores.square().sum().backward()
        found.append((scores, [parameter.grad for parameter in model.trained_parameters()]))
    (plain, expected), (narrow, gradients) = found
    assert_close(narrow, plain)
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other)


def test_where_most_tokens_are_wanted_or_layers_recomputed_nothing_is_narrowed():
    model = tiny("llama")
    short = make_batch([[1, 2]] * 4, [[3, 4, 5, 6, 7, 8, 9]] * 3 + [[7, 8, 9, 1, 2, 3, 4]])
    found = response_logps(model, short, with_states=False)
    assert found.layout.spans
    assert found.layout.kept is None
    assert response_logps(model, ROWS, layer_context=noop_context_fn, with_states=False).layout.kept is None
    nobody = torch.zeros_like(ROWS.attention_mask)
    assert lay_out(model.base_model, ROWS, nobody).kept is None


@pytest.mark.parametrize("fault", ["states of others", "no attention"])
def test_a_layer_that_cannot_be_narrowed_is_computed_whole(fault):
    model = tiny("llama")
    expected = response_logps(model, ROWS).token_logps
    layer = last_layer_of(model.base_model)
    forward = layer.forward

    def mixes(hidden_states, *args, **kwargs):
        return forward(hidden_states, *args, **kwargs) + hidden_states.mean(1, keepdim=True)

    layer.forward = mixes if fault == "states of others" else lambda hidden_states, *_, **__: hidden_states * 2
    for _ in range(2):
        found = response_logps(model, ROWS, with_states=False)
        assert found.layout.spans or fault == "states of others"  # which are others in packed rows, too
        assert found.layout.kept is None
    # GPT-2's decoder gives its states the shape of the ids.
    assert response_logps(tiny("gpt2"), ROWS, with_states=False).layout.kept is None
    del layer.forward
    packing._NARROWS.clear()
    packing._PACKS.clear()
    assert_close(response_logps(model, ROWS, with_states=False).token_logps, expected)


def test_nothing_is_held_after_a_forward():
    model = tiny("llama")
    with torch.no_grad():
        response_logps(model, ROWS, with_states=False)
        gc.collect()
        gc.disable()
        try:
            before = live_tensor_bytes()
            response_logps(model, ROWS, with_states=False)
            assert live_tensor_bytes() < before + 1_000  # the hidden states of a layer have 27,136
        finally:
            gc.enable()


def test_a_retained_graph_gives_the_same_gradients_again():
    model = tiny("llama")
    sums = response_logps(model, ROWS, with_states=False).sums.sum()
    first, second = (torch.autograd.grad(sums, list(model.parameters()), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
