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
    assert packed.layout.spans
    assert not plain.layout.spans
    # The softmax of Gemma2's attention is float32 in any case.
    tolerance = 1e-9 if dtype == torch.float64 and architecture != "gemma2" else 1e-5
    assert_close(packed.token_logps, plain.token_logps, tolerance)
    assert_close(packed.states[rows.attention_mask], plain.states[rows.attention_mask], tolerance)
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1)
        assert_close(gradients[name] / scale, gradient / scale, tolerance)


def test_what_is_shared_is_read_once_and_nothing_is_padded(packs):
    packs(True)
    layout = lay_out(tiny("llama").base_model, batch())
    # The equal response stands once.
    assert layout.inputs["input_ids"].shape == (1, len(LONG) + 3 + 1 + 2 + 3 + 2)
    picked = layout.inputs["input_ids"][layout.row, layout.column]
    assert torch.equal(picked[batch().attention_mask], batch().input_ids[batch().attention_mask])


@pytest.mark.parametrize("kept", [True, False])
def test_logits_of_a_response_that_rows_share_are_computed_once(packs, kept):
    model = tiny("llama", torch.float64)
    read = []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[-2]))
    # Two rows say [40, 41, 42]; without their last tokens [44, 45] and [46, 47] have one to score.
    scored(model, batch(), packs, on=True, score_last_token=kept)
    assert read == [3 + 1 + 2 + 2 if kept else 2 + 1 + 1]
    scored(model, batch(), packs, on=False, score_last_token=kept)
    assert read[1:] == [3 + 1 + 2 + 2 + 3 if kept else 2 + 1 + 1 + 2]


def test_rows_of_unequal_length_are_not_padded(packs):
    packs(True)
    rows = varied()
    layout = lay_out(tiny("llama").base_model, rows)
    assert layout.inputs["input_ids"].shape == (1, rows.attention_mask.sum())
    picked = layout.inputs["input_ids"][layout.row, layout.column]
    assert torch.equal(picked[rows.attention_mask], rows.input_ids[rows.attention_mask])
    # Each begins at position 0.
    positions = layout.inputs["position_ids"][layout.row, layout.column]
    assert (positions[rows.attention_mask] == (rows.attention_mask.cumsum(1) - 1)[rows.attention_mask]).all()


def test_what_all_responses_begin_with_is_read_once(packs):
    model = tiny("llama", torch.float64)
    responses = [[7, 7, 30, 31], [7, 7], [7, 7, 32], [7, 7, 30, 33, 34]]
    rows = make_batch([LONG] * 4, responses, extra_padding=2)
    plain, expected = scored(model, rows, packs, on=False)
    packed, gradients = scored(model, rows, packs, on=True)
    assert packed.layout.inputs["input_ids"].shape == (1, len(LONG) + 2 + 2 + 0 + 1 + 3)
    assert_close(packed.token_logps, plain.token_logps, 1e-9)
    assert_close(packed.states[rows.attention_mask], plain.states[rows.attention_mask], 1e-9)
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, 1e-9)


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
    assert layout.spans
    picked = layout.inputs["input_ids"][layout.row, layout.column]
    assert torch.equal(picked[rows.attention_mask], rows.input_ids[rows.attention_mask])


def test_rows_without_a_common_prompt_stay_as_they_are(packs):
    packs(True)
    rows = make_batch([[1, 2, 3], [4, 5, 6]], [[7], [8]])
    assert not lay_out(tiny("llama").base_model, rows).spans


def test_many_long_responses_are_read_in_groups(packs):
    """Otherwise the scores of responses to one another, computed for nothing, would grow with their number squared."""
    packs(True)
    rows = make_batch([LONG * 8] * 64, [[index + 20] * 40 for index in range(64)])
    layout = lay_out(tiny("llama").base_model, rows)
    assert layout.inputs["input_ids"].shape == (1, len(LONG) * 8 + 64 * 40)
    (span,) = layout.spans
    assert span.sizes == [len(LONG) * 8 + 40, *[160] * 15, 120]
    assert [mask.shape for mask in span.masks] == [(size, len(LONG) * 8 + size) for size in span.sizes[1:]]


def test_groups_of_responses_are_plain_rows(packs):
    model = tiny("llama", torch.float64)
    rows = make_batch([LONG] * 9, [[index + 20] * (10 + 5 * index) for index in range(9)])
    plain, expected = scored(model, rows, packs, on=False)
    packed, gradients = scored(model, rows, packs, on=True)
    assert len(packed.layout.spans[0].masks) > 1
    assert_close(packed.token_logps, plain.token_logps, 1e-9)
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, 1e-9)


def test_a_window_shorter_than_the_rows_is_not_packed(packs):
    packs(True)
    rows = batch()
    model = tiny("gemma2", torch.float32, sliding_window=8)
    assert not lay_out(model.base_model, rows).spans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_an_attention_of_its_own_is_found_out_and_named(packs, monkeypatch, dtype):
    packs(True)
    decoder = tiny("llama", dtype).base_model
    forward = decoder.forward

    def deaf(**inputs):
        chosen, decoder.config._attn_implementation = decoder.config._attn_implementation, "sdpa"
        try:
            return forward(**inputs)
        finally:
            decoder.config._attn_implementation = chosen

    monkeypatch.setattr(decoder, "forward", deaf)
    with pytest.warns(
        UserWarning, match=r"LlamaModel does not let its attention be exchanged \(states of size .* would be off by"
    ):
        layout = lay_out(decoder, batch())
    assert not layout.spans
    assert not lay_out(decoder, batch()).spans  # and says so once


def forwards(decoder, rows):
    """How often a decoder is called to lay rows out."""
    calls = []
    hook = decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    lay_out(decoder, rows)
    hook.remove()
    return len(calls)


def test_in_a_sharded_run_all_processes_try_it_whatever_their_rows_are(monkeypatch):
    short, one = make_batch([[1, 2], [3, 4]], [[5], [6]]), make_batch([[1, 2]], [[3]])
    long = make_batch([LONG, LONG], [[5], [6]])
    for sharded, expected in ((True, [2, 2, 2]), (False, [0, 0, 0])):
        monkeypatch.setattr(packing, "in_shares", lambda _, sharded=sharded: sharded)
        models = [tiny("gemma2", torch.float32, sliding_window=8).base_model for _ in range(3)]
        assert [forwards(model, rows) for model, rows in zip(models, (short, one, long), strict=True)] == expected


def test_a_model_in_train_mode_reads_rows_as_they_are_and_is_tried_later(packs):
    packs(True)
    decoder = tiny("gpt2", resid_pdrop=0.1).base_model
    assert not lay_out(decoder.train(), batch()).spans
    assert lay_out(decoder.eval(), batch()).spans


def test_few_tokens_in_all_are_enough_for_the_trial(packs):
    packs(True)
    rows = make_batch([[1, 2, 3, 4] * 5] * 3, [[5], [6], [7]])
    assert lay_out(tiny("llama", vocab_size=8).base_model, rows).spans


def test_rows_without_a_token(packs):
    packs(True)
    rows = make_batch([[], [], []], [[], [], []], extra_padding=4)
    assert response_logps(tiny("llama"), rows).sums.tolist() == [0, 0, 0]


def test_the_first_token_of_a_text_without_a_prompt_is_not_scored_on_either_side(packs):
    model, found = tiny("llama"), []
    rows = make_batch([[], LONG, LONG], [[4, 5, 6], [7], [8, 9]])
    shifts = (~rows.attention_mask).sum(1).tolist()
    rolled = [
        torch.stack([row.roll(shift) for row, shift in zip(column, shifts, strict=True)])
        for column in (rows.input_ids, rows.attention_mask, rows.response_mask)
    ]
    for on in (False, True):
        packs(on)
        found += [response_logps(model, some).sums for some in (rows, type(rows)(*rolled))]
    for other in found[1:]:
        assert_close(other, found[0], 1e-9)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_a_retained_graph_is_computed_again_and_again(packs, on, lora):
    packs(on)
    team = perturb(make_team(lora=lora, dtype="float64", gradient_checkpointing=True).load(), 1)
    sums = team.response_logps(0, batch()).sum()
    parameters = [p for p in team.agent_parameters(0).values() if p.requires_grad]
    first, second = (torch.autograd.grad(sums, parameters, retain_graph=True, allow_unused=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


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
