"""A model is tried before it is trusted: what differs from its plain forward is found, and done the plain way."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from helpers import assert_close, make_batch, tiny
from pbrl_lightning import AgentTeam
from pbrl_lightning.agents import self_check
from pbrl_lightning.agents.decoding import DecodedRows, OwnCacheRows, RecomputedRows, rows_for
from pbrl_lightning.agents.forward import READINGS, Reading, reading_of
from pbrl_lightning.agents.loading import tiny_tokenizer
from pbrl_lightning.agents.logprobs import response_logps
from pbrl_lightning.agents.self_check import check_decoder, check_model, try_model
from pbrl_lightning.utils.errors import ConfigurationError

ROWS = make_batch([[5, 6, 7, 8], [9], [9]], [[10, 11], [12], [13, 14, 15]])


def plain_sums(model):
    """Of each row, read alone."""
    sums = []
    for ids, mask, said in zip(ROWS.input_ids, ROWS.attention_mask, ROWS.response_mask, strict=True):
        text = ids[mask]
        logps = model(input_ids=text[None]).logits[0].log_softmax(-1)
        targets = said[mask].nonzero()[:, 0]
        sums.append(logps[targets - 1, text[targets]].sum())
    return torch.stack(sums)


def odd(forward_class):
    """A tiny random model of a class that differs from Llama."""
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = forward_class(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


class AroundItsDecoder(LlamaForCausalLM):
    """Reaches its layers past the decoder's own forward."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **_):
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        states = type(self.model).forward(self.model, input_ids, cache=cache, **inputs)[0]
        return CausalLMOutput(logits=self.lm_head(states))


class CountsOtherwise(LlamaForCausalLM):
    """Positions are squares of columns, whatever it is told."""

    def forward(self, input_ids=None, position_ids=None, cache=None, **kwargs):
        start = 0 if cache is None else cache.get_seq_length()
        places = torch.arange(start, start + input_ids.shape[1])[None] ** 2
        return super().forward(input_ids=input_ids, position_ids=places, cache=cache, **kwargs)


class NoCache(LlamaForCausalLM):
    """Ignores the cache it is given."""

    def forward(self, input_ids=None, cache=None, **kwargs):
        kwargs.pop("use_cache", None)
        return super().forward(input_ids=input_ids, use_cache=False, **kwargs)


class Backwards(LlamaForCausalLM):
    """Not causal."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits + output.logits.mean(1, keepdim=True)
        return output


class Random(LlamaForCausalLM):
    """Never the same."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits * (1 + torch.rand_like(output.logits))
        return output


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Gemma2's float64 turns rows that see padding alone into NaN, see `tiny`.
USUAL = [*itertools.product(["llama", "gpt2", "granite"], DTYPES), *(("gemma2", dtype) for dtype in DTYPES[1:])]


@pytest.mark.parametrize(("architecture", "dtype"), USUAL)
def test_the_usual_models_are_read_as_ever(architecture, dtype):
    model = tiny(architecture, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_model(model) == Reading()
    trial = try_model(model)
    assert not trial.errors
    assert max(trial.off.values()) <= {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.02)


@pytest.mark.parametrize(
    ("kind", "reading", "rows"),
    [
        (AroundItsDecoder, {"split": False}, None),
        (NoCache, {"sampling": "recomputed"}, RecomputedRows),
    ],
)
def test_what_differs_is_done_the_plain_way_and_named_once(kind, reading, rows):
    model = odd(kind)
    with pytest.warns(UserWarning, match=rf"agent 0 \({kind.__name__}\) was tried against its plain forward: "):
        found = check_model(model, "the model of agent 0")
    assert {name: getattr(found, name) for name in reading} == reading
    assert rows is None or rows_for(model, 20) is rows
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_model(model, "the model of agent 0") is found
    with torch.no_grad():
        assert_close(response_logps(model, ROWS).sums.double(), plain_sums(model), 1e-6)


def test_positions_of_its_own_are_found():
    model = odd(CountsOtherwise)
    with pytest.warns(
        UserWarning, match="padded on the right, without mask and positions; logits are computed for all tokens"
    ):
        assert not check_model(model).padded
    assert issubclass(rows_for(model, 20), OwnCacheRows | RecomputedRows)
    with torch.no_grad():
        assert_close(response_logps(model, ROWS).sums.double(), plain_sums(model), 1e-6)


@pytest.mark.parametrize(
    ("kind", "message"), [(Backwards, "from those after them"), (Random, "other logits whenever it is asked")]
)
def test_what_has_no_right_way_is_refused(kind, message):
    model = odd(kind)
    with pytest.raises(ConfigurationError, match=message):
        check_model(model)
    assert model not in READINGS


def test_a_team_tries_its_models_when_it_is_loaded():
    with pytest.raises(ConfigurationError, match=r"the model of agent 1 \(Backwards\) predicts"):
        AgentTeam([odd(LlamaForCausalLM), odd(Backwards)], tokenizers=tiny_tokenizer()).load()


def test_the_check_costs_no_random_numbers_no_gradients_and_once_per_kind(monkeypatch):
    calls, original = [], self_check.try_model
    monkeypatch.setattr(self_check, "try_model", lambda *args: calls.append(args) or original(*args))
    monkeypatch.setattr(self_check, "_KNOWN", {})
    state = torch.get_rng_state()
    models = [tiny("llama", seed=seed) for seed in range(3)]
    for model in [*models, *models]:
        check_model(model)
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in models[0].parameters())
    check_model(tiny("llama", torch.float32))
    assert len(calls) == 2


def test_of_a_diverged_model_nothing_is_said(monkeypatch):
    monkeypatch.setattr(self_check, "_KNOWN", {})
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    assert try_model(model) is None
    assert check_model(model) == Reading()
    assert model not in READINGS


def test_a_backbone_is_tried_by_its_states():
    model = odd(LlamaForCausalLM)
    check_decoder(model.model)
    assert reading_of(model.model) == Reading()
    with pytest.warns(UserWarning, match=r"the reward model \(Gemma2Model\) was tried .*padded on the right"):
        check_decoder(tiny("gemma2").base_model, "the reward model")


def test_decoding_kinds_agree():
    model = tiny("llama")
    prompts, source = [[5, 6, 7], [8]], torch.tensor([0, 0, 1])
    found = []
    with torch.no_grad():
        for kind in (DecodedRows, OwnCacheRows, RecomputedRows):
            rows = kind(model, prompts, source, 4)
            steps = [rows.logits]
            rows.step(torch.tensor([9, 10, 11]))
            steps.append(rows.logits)
            rows.keep(torch.tensor([1, 2]))
            rows.step(torch.tensor([12, 13]))
            steps.append(rows.logits)
            rows.keep(torch.tensor([1]))
            rows.step(torch.tensor([14]))
            found.append(torch.cat([*steps, rows.logits]))
    assert_close(found[1], found[0], 1e-9)
    assert_close(found[2], found[0], 1e-9)
