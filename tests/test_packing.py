"""Packed rows: responses behind one copy of their prompt have the states and gradients of plain rows."""

import pytest
import torch

from helpers import assert_close, make_batch, tiny
from pbrl_lightning import LoraOptions
from pbrl_lightning.agents import packing
from pbrl_lightning.agents.logprobs import response_logps
from pbrl_lightning.agents.packing import lay_out
from pbrl_lightning.models.reward import JointRewardModel
from training_runs import make_team, perturb

LONG = list(range(10, 34))
PROMPTS = [LONG, LONG, LONG, [5, 6, 7], LONG, [5, 6, 7]]
RESPONSES = [[40, 41, 42], [43], [44, 45], [46, 47], [40, 41, 42], []]


def batch(extra_padding=0):
    return make_batch(PROMPTS, RESPONSES, extra_padding=extra_padding)


def varied(extra_padding=0):
    """One long row, and short ones of other prompts that fit into one of its length together."""
    prompts = [LONG, *([index, index + 3] for index in range(4, 9)), [9, 8, 7]]
    responses = [[40, 41, 42, 43], *([index + 50] * (index % 3 + 1) for index in range(4, 9)), [60]]
    return make_batch(prompts, responses, extra_padding=extra_padding)


@pytest.fixture
def packs(monkeypatch):
    """Turns packing on or off."""

    def turn(on):
        monkeypatch.setattr(packing, "may_exchange_attention", packing_allowed if on else lambda *_: False)

    packing_allowed = packing.may_exchange_attention
    return turn


def scored(model, rows, packs, on, **options):
    packs(on)
    model.zero_grad()
    found = response_logps(model, rows, **options)
    (found.token_logps.sin().sum() + 0.1 * found.states[rows.response_mask].square().sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return found, gradients


@pytest.mark.parametrize("kind", [batch, varied])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "granite"])
def test_packed_rows_are_plain_rows(packs, architecture, dtype, kind):
    model = tiny(architecture, dtype, **({"sliding_window": 128} if architecture == "gemma2" else {}))
    rows = kind(extra_padding=3)
    plain, expected = scored(model, rows, packs, on=False)
    packed, gradients = scored(model, rows, packs, on=True)
    assert packed.layout.inputs["attention_mask"].dim() == 4
    assert plain.layout.inputs["attention_mask"].dim() == 2
    # The softmax of Gemma2's attention is float32 in any case.
    tolerance = 1e-9 if dtype == torch.float64 and architecture != "gemma2" else 1e-5
    assert_close(packed.token_logps, plain.token_logps, tolerance)
    assert_close(packed.states[rows.attention_mask], plain.states[rows.attention_mask], tolerance)
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1)
        assert_close(gradients[name] / scale, gradient / scale, tolerance)


def test_what_is_shared_is_read_once(packs):
    model = tiny("llama")
    packs(True)
    layout = lay_out(model.base_model, batch())
    mask = layout.inputs["attention_mask"]
    assert layout.inputs["input_ids"].shape == (2, len(LONG) + 3 + 1 + 2)  # the equal response stands once
    assert (mask.diagonal(dim1=2, dim2=3) == 0).all()
    picked = layout.inputs["input_ids"][layout.row, layout.column]
    assert torch.equal(picked[batch().attention_mask], batch().input_ids[batch().attention_mask])


def test_short_packs_stand_where_padding_would(packs):
    packs(True)
    layout = lay_out(tiny("llama").base_model, varied())
    assert layout.inputs["input_ids"].shape == (2, len(LONG) + 4)
    assert layout.row.tolist()[0] == [layout.row[0, 0].item()] * (len(LONG) + 4)
    assert {int(row[0]) for row in layout.row[1:]} == {1 - int(layout.row[0, 0])}
    rows = varied()
    picked = layout.inputs["input_ids"][layout.row, layout.column]
    assert torch.equal(picked[rows.attention_mask], rows.input_ids[rows.attention_mask])
    # Each begins at position 0 and sees no other pack.
    positions = layout.inputs["position_ids"][layout.row, layout.column]
    assert (positions[rows.attention_mask] == (rows.attention_mask.cumsum(1) - 1)[rows.attention_mask]).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_padded_on_either_side_are_told_apart(packs, side):
    model = tiny("llama")
    packs(True)
    rows = batch()
    if side == "left":
        shifts = (~rows.attention_mask).sum(1).tolist()
        rolled = [
            torch.stack([row.roll(shift) for row, shift in zip(column, shifts, strict=True)])
            for column in (rows.input_ids, rows.attention_mask, rows.response_mask)
        ]
        rows = type(rows)(*rolled)
    layout = lay_out(model.base_model, rows)
    assert layout.inputs["attention_mask"].dim() == 4
    picked = layout.inputs["input_ids"][layout.row, layout.column]
    assert torch.equal(picked[rows.attention_mask], rows.input_ids[rows.attention_mask])


def test_rows_without_a_common_prompt_stay_as_they_are(packs):
    packs(True)
    rows = make_batch([[1, 2, 3], [4, 5, 6]], [[7], [8]])
    assert lay_out(tiny("llama").base_model, rows).inputs["attention_mask"].dim() == 2


def test_many_long_responses_do_not_all_stand_in_one_row(packs):
    packs(True)
    rows = make_batch([LONG * 8] * 64, [[index + 20] * 40 for index in range(64)])
    layout = lay_out(tiny("llama").base_model, rows)
    count, width = layout.inputs["input_ids"].shape
    assert count > 4
    assert count * width < rows.input_ids.numel()


def test_a_window_shorter_than_the_rows_is_not_packed(packs):
    packs(True)
    rows = batch()
    model = tiny("gemma2", torch.float32, sliding_window=8)
    assert lay_out(model.base_model, rows).inputs["attention_mask"].dim() == 2


def test_a_model_that_ignores_the_mask_is_found_out_and_named(packs, monkeypatch):
    packs(True)
    decoder = tiny("llama").base_model
    forward = decoder.forward

    def deaf(input_ids, attention_mask=None, position_ids=None, **options):
        mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        return forward(input_ids, attention_mask=mask, position_ids=position_ids, **options)

    monkeypatch.setattr(decoder, "forward", deaf)
    with pytest.warns(UserWarning, match="LlamaModel does not take a 4-D attention mask"):
        layout = lay_out(decoder, batch())
    assert layout.inputs["attention_mask"].dim() == 2
    assert lay_out(decoder, batch()).inputs["attention_mask"].dim() == 2  # and says so once


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_and_checkpointing_under_packing(packs, checkpointing):
    team = perturb(make_team(lora=True, dtype="float64", gradient_checkpointing=checkpointing).load(), 1)
    found = []
    for on in (False, True):
        packs(on)
        team.zero_grad()
        logps = [team.response_logps(agent, batch()) for agent in range(2)]
        (logps[0] * logps[1]).sum().backward()
        gradients = [p.grad.clone() for agent in range(2) for p in team.agent_parameters(agent).values()]
        found.append((torch.stack(logps), gradients))
    (plain, expected), (packed, gradients) = found
    assert_close(packed, plain)
    assert not torch.equal(plain[0], plain[1])
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other)


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)])
def test_a_reward_model_reads_a_shared_prompt_once(packs, lora):
    model = JointRewardModel("builtin:tiny", dtype="float64", lora=lora).load()
    rows, found = batch(), []
    for on in (False, True):
        packs(on)
        model.zero_grad()
        scores = model(rows)
        scores.square().sum().backward()
        found.append((scores.detach(), [p.grad.clone() for p in model.trained_parameters()]))
    (plain, expected), (packed, gradients) = found
    assert_close(packed, plain)
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other)
