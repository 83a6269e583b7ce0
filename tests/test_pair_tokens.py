"""Pairs as token ids, and the batches of an epoch."""

import io
import json
import math

import pytest
import torch

from helpers import pad_ids, save_model, tiny
from pbrl_lightning import AgentTeam
from pbrl_lightning.batches import PairTokens, PreferencePair, Response, TeamSample
from pbrl_lightning.losses import madpo_losses
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.preferences.pair_tokens import (
    PairLoader,
    pairs_from_state,
    pairs_to_state,
    tokenise_pair,
    trainable_pairs,
)
from pbrl_lightning.preferences.round_files import read_round_file, write_round_file
from training_runs import SAMPLING, make_team

EOS = 1


@pytest.fixture(scope="module")
def team():
    return make_team().load()


def text_pair(prompts, winner, loser, mean=0.0):
    return PreferencePair(prompts, winner, loser, 1.0, 0.0, mean)


def numbered_pairs(count):
    """Pair ``i`` has mean ``i`` and the token 10 + i everywhere, with lengths that differ."""
    pairs = [text_pair(["a", "b"], ["w", "w"], ["l", "l"], float(i)) for i in range(count)]
    tokens = [
        PairTokens([[0] * (1 + i % 3), [0]], [[10 + i] * (1 + i % 4), [10 + i]], [[10 + i, 9], [9] * (i % 2)])
        for i in range(count)
    ]
    return pairs, tokens


def loader(team, count, batch_size=2, **options):
    return PairLoader(pad_ids(team), *numbered_pairs(count), batch_size, **{"seed": 0, **options})


def order_of(batches):
    return [int(i) for batch in batches for i in batch.candidate_reward_means[batch.weights > 0].tolist()]


def test_the_order_is_counted_and_new_every_epoch_and_round(team):
    first = order_of(loader(team, 20, round_number=1, epoch=0))
    torch.manual_seed(99)
    assert order_of(loader(team, 20, round_number=1, epoch=0)) == first
    others = [
        order_of(loader(team, 20, round_number=1, epoch=1)),
        order_of(loader(team, 20, round_number=2, epoch=0)),
        order_of(loader(team, 20, round_number=1, epoch=0, seed=1)),
        list(range(20)),
    ]
    assert all(sorted(other) == list(range(20)) for other in others)
    assert len({tuple(order) for order in [first, *others]}) == 5


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 7, 12, 13])
def test_ranks_cover_every_pair_once_and_make_the_same_steps(team, count, batch_size, world_size):
    ranks = [list(loader(team, count, batch_size, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {math.ceil(count / (batch_size * world_size))}
    assert len(loader(team, count, batch_size, world_size=world_size)) == len(ranks[0])
    assert sorted(row for batches in ranks for row in order_of(batches)) == list(range(count))
    single = list(loader(team, count, batch_size * world_size))
    for step, whole in enumerate(single):
        assert len({len(batches[step]) for batches in ranks}) == 1
        # One step of many ranks is one step of one rank with the larger batch.
        assert sorted(row for batches in ranks for row in order_of([batches[step]])) == sorted(order_of([whole]))
    for batch in [batch for batches in ranks for batch in batches]:
        assert set(batch.weights.tolist()) <= {0.0, 1.0}
        assert all(len(agent.input_ids) == 2 * len(batch) for agent in batch.agents)


@pytest.mark.parametrize(
    ("count", "batch_size", "accumulation", "world_size"),
    [
        (8, 2, 4, 1),
        (8, 8, 1, 1),
        (7, 2, 2, 1),
        (13, 2, 3, 2),
        (5, 1, 4, 3),
        (1, 2, 2, 2),
        (9, 3, 1, 2),
    ],
)
def test_fault_B35_scaled_losses_are_the_mean_over_one_big_batch(team, count, batch_size, accumulation, world_size):
    losses = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    ranks = [
        list(loader(team, count, batch_size, accumulation=accumulation, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for start in range(0, len(ranks[0]), accumulation):
        total, rows = 0.0, []
        for batches in ranks:
            for batch in batches[start : start + accumulation]:
                indices = batch.candidate_reward_means.long()
                scaled = (losses[indices] * batch.weights).sum().item() * batch.loss_scale
                total += scaled / accumulation / world_size  # what Lightning and DDP divide by
                rows += order_of([batch])
        assert total == pytest.approx(losses[rows].mean().item(), abs=1e-12)
        assert len(rows) == min(batch_size * world_size * accumulation, count - start * batch_size * world_size)


def test_rows_hold_the_ids_of_their_pair_and_masks_come_from_lengths(team):
    _, tokens = numbered_pairs(9)
    for batch in loader(team, 9, batch_size=4):
        rows = batch.candidate_reward_means.long().tolist()
        for agent, table in enumerate(batch.agents):
            responses = [tokens[i].winner[agent] for i in rows] + [tokens[i].loser[agent] for i in rows]
            for ids, attention, mask, i, response in zip(
                table.input_ids, table.attention_mask, table.response_mask, rows * 2, responses, strict=True
            ):
                prompt = tokens[i].prompts[agent]
                assert ids[attention].tolist() == prompt + response
                assert ids[mask].tolist() == response
                assert attention.tolist() == sorted(attention.tolist(), reverse=True)


def test_fault_B65_the_position_goes_on_where_it_was(team):
    whole = order_of(loader(team, 11))
    for taken in range(6):
        stopped = loader(team, 11)
        iterator = iter(stopped)
        seen = order_of([next(iterator) for _ in range(taken)])
        state = stopped.state_dict()
        torch.load(_saved(state), weights_only=True)
        resumed = loader(team, 11)
        resumed.load_state_dict(state)
        assert seen + order_of(resumed) == whole
        assert order_of(resumed) == whole  # the epoch after it starts from the beginning
    done = loader(team, 11)
    iterator = iter(done)
    [next(iterator) for _ in range(6)]
    finished = loader(team, 11)
    finished.load_state_dict(done.state_dict())  # stood on the last batch
    assert order_of(finished) == whole


def _saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


class Sampled:
    """A team that said fixed ids, some of which no tokenizer would give for their text."""

    SAID = (
        [[70, 71, EOS], [80, EOS]],  # ended
        [[72, 73, 74], [81, 2, 82]],  # cut by the length limit; an id whose text is dropped
        [[EOS], [83, 84, EOS]],  # said nothing
    )

    def __init__(self, team):
        self.team = team

    def sample(self, items, item_indices, *, num_candidates, **options):
        decode = self.team.tokenizer(0).decode
        responses = [
            {
                k: Response(decode(row[agent], skip_special_tokens=True), row[agent], row[agent][-1] == EOS)
                for k, row in enumerate(self.SAID)
            }
            for agent in range(2)
        ]
        return [TeamSample(i, ["p", "q"], responses, [[0, 90], [0, 91, 92]]) for i in item_indices]


def collected(team):
    oracle = Oracle(lambda first, second: [float(len(a) + 10 * len(b)) for a, b in zip(first, second, strict=True)])
    collector = Collector(oracle, SAMPLING, 3, "all", None, 0)
    (part,) = collector.collect(Sampled(team), [{"prompt": "p"}], [0], 1)
    assert len(part.pairs) == 3  # scores 12, 23 and 20
    return part.pairs


def test_fault_B08_B10_base_runs_train_on_the_sampled_ids_with_one_eos(team):
    pairs = collected(team)
    kept, tokens = trainable_pairs(team, pairs)
    said = {tuple(map(tuple, row)) for row in Sampled.SAID}
    rows = 0
    for batch in PairLoader(pad_ids(team), kept, tokens, 1, 0):
        for row in range(2):
            response = tuple(tuple(agent.input_ids[row][agent.response_mask[row]].tolist()) for agent in batch.agents)
            assert response in said
            for ids in response:
                assert ids.count(EOS) == (1 if ids[-1] == EOS else 0)
            rows += 1
        assert [agent.input_ids[0][: 2 + i].tolist() for i, agent in enumerate(batch.agents)] == [[0, 90], [0, 91, 92]]
    assert rows == 2 * len(kept)


def test_fault_B07_B08_round_files_hold_no_ids_and_what_is_read_back_is_tokenised_again(team, tmp_path):
    pairs = collected(team)
    write_round_file(tmp_path / "iteration_0001.json", 1, pairs)
    record = json.loads((tmp_path / "iteration_0001.json").read_text())["pairs"][0]
    assert set(record) == {
        "prompts",
        "winner_completions",
        "loser_completions",
        "winner_reward",
        "loser_reward",
        "candidate_reward_mean",
        "raw_rewards",
        "target_raw_reward",
        "comparator_raw_reward",
    }
    for pair in read_round_file(tmp_path / "iteration_0001.json"):
        encoded = tokenise_pair(team, pair)
        tokenizer = team.tokenizer(0)
        for agent in range(2):
            assert encoded.prompts[agent] == tokenizer(pair.prompts[agent])["input_ids"]
            assert encoded.prompts[agent][0] == 0
            for ids, texts in ((encoded.winner, pair.winner_completions), (encoded.loser, pair.loser_completions)):
                assert ids[agent] == tokenizer(texts[agent], add_special_tokens=False)["input_ids"]
                assert EOS not in ids[agent]
                assert 0 not in ids[agent]


def test_fault_B10_B80_checkpoints_keep_the_ids(team):
    pairs = [*collected(team), text_pair(["p", "q"], ["a", "b"], ["c", ""])]
    state = torch.load(_saved(pairs_to_state(pairs)), weights_only=True)
    assert pairs_from_state(state) == pairs
    assert json.loads(json.dumps(state)) == state


def test_fault_B01_pad_equal_to_eos_is_no_matter(team):
    tokenizer = team.tokenizer(0)
    pad = tokenizer.pad_token
    pairs, tokens = trainable_pairs(team, collected(team))
    plain = list(PairLoader(pad_ids(team), pairs, tokens, 4, 0))
    tokenizer.pad_token = tokenizer.eos_token
    try:
        padded = list(PairLoader(pad_ids(team), pairs, tokens, 4, 0))
    finally:
        tokenizer.pad_token = pad
    for agent, other in zip(plain[0].agents, padded[0].agents, strict=True):
        assert torch.equal(agent.response_mask, other.response_mask)
        assert torch.equal(agent.input_ids[agent.attention_mask], other.input_ids[other.attention_mask])
    assert (padded[0].agents[0].input_ids[~padded[0].agents[0].attention_mask] == EOS).all()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """One agent with 24 positions."""
    path = save_model(tiny("gpt2", torch.float32, n_positions=24), tmp_path_factory.mktemp("short"))
    return AgentTeam(path, num_agents=1, dtype="float64").load()


PROMPT = "abcdefghijklmnopqrst"  # 21 ids with BOS


@pytest.mark.parametrize(("winner", "loser"), [(10, 3), (3, 10), (23, 1), (5, 0)])
def test_fault_B16_both_sides_share_the_prompt_that_fits_beside_the_longer_one(short, winner, loser):
    short.counts.clear()
    pair = text_pair([PROMPT], ["w" * winner], ["l" * loser])
    with pytest.warns(UserWarning, match="cut on the left"):
        tokens = tokenise_pair(short, pair)
    full = short.tokenizer(0)(PROMPT)["input_ids"]
    assert tokens.prompts[0] == full[-(24 - max(winner, loser)) :]
    assert (len(tokens.winner[0]), len(tokens.loser[0])) == (winner, loser)
    assert short.counts == {"truncated_prompts": 1}


@pytest.mark.parametrize(("winner", "loser"), [(24, 2), (2, 100), (60, 50)])
def test_fault_B12_B13_a_response_longer_than_the_context_is_cut_counted_and_finite(short, winner, loser):
    short.counts.clear()
    pair = text_pair([PROMPT], ["w" * winner], ["l" * loser])
    with pytest.warns(UserWarning, match="cut to the 23"):
        kept, tokens = trainable_pairs(short, [pair])
    assert short.counts["truncated_responses"] == (winner > 23) + (loser > 23)
    assert (len(tokens[0].winner[0]), len(tokens[0].loser[0])) == (min(winner, 23), min(loser, 23))
    assert len(tokens[0].prompts[0]) == 1
    (batch,) = PairLoader(pad_ids(short), kept, tokens, 1, 0)
    logps = short.response_logps(0, batch.agents[0], True)
    loss = madpo_losses(logps[None, :1], logps[None, 1:], 0.1)
    assert torch.isfinite(loss).all()
    assert abs(loss.item() - math.log(2)) > 1e-3


def test_fault_B14_pairs_that_cutting_makes_equal_are_dropped_and_counted(short):
    short.counts.clear()
    same = text_pair([PROMPT], ["x" * 23 + "a"], ["x" * 23 + "b"], 1.0)
    other = text_pair([PROMPT], ["x" * 22 + "a"], ["x" * 22 + "b"], 2.0)
    with pytest.warns(UserWarning, match="same tokens on both sides") as caught:
        kept, tokens = trainable_pairs(short, [same, other, same])
    assert kept == [other]
    assert len(tokens) == 1
    assert short.counts["identical_pairs"] == 2
    assert sum("same tokens on both sides" in str(warning.message) for warning in caught) == 1


def test_a_pair_that_differs_for_one_agent_alone_stays(team):
    pair = text_pair(["p", "q"], ["same", "one"], ["same", "two"])
    assert trainable_pairs(team, [pair])[0] == [pair]


def test_a_pair_of_another_team_is_an_error(team):
    with pytest.raises(ValueError, match="a pair of 1 agents cannot train a team of 2"):
        trainable_pairs(team, [text_pair(["p"], ["a"], ["b"])])
