"""Collection against a literal brute force: sample, score every joint response by itself, compare all of them."""

from contextlib import contextmanager
from itertools import combinations
from statistics import fmean

import pytest

from pbrl_lightning import CurrentComparator, SamplingConfig
from pbrl_lightning.batches import Response, TeamSample
from pbrl_lightning.comparators.base import Comparator
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.oracle import Oracle
from training_runs import SAMPLING, make_team, perturb, text_reward

ITEMS = [{"prompt": "ab"}, {"prompt": "c"}, {"prompt": "def"}]
INDICES = [4, 0, 7]
SEED = 5


@pytest.fixture(scope="module")
def team():
    return perturb(make_team(dtype="float64").load(), 1)


def make_collector(reward=text_reward, processor=None, count=6, comparator=None, limit=None, **options):
    selection = options.pop("selection", "reward_gap")
    sampling = options.pop("sampling", SAMPLING)
    return Collector(Oracle(reward, processor), sampling, count, selection, limit, SEED, comparator)


def brute_samples(team, stream, count, round_number):
    """Per item: (prompts, {candidate index: texts}), each item sampled alone."""
    found = []
    for item, index in zip(ITEMS, INDICES, strict=True):
        sample = team.sample(
            [item], [index], num_candidates=count, sampling=SAMPLING, seed=SEED, stream=stream, step=round_number
        )[0]
        found.append((sample.prompts, {k: [agent[k].text for agent in sample.responses] for k in range(count)}))
    return found


def one_score(texts):
    return text_reward(*[[text] for text in texts])[0]


def as_record(pair):
    fields = ("prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward")
    more = ("candidate_reward_mean", "raw_rewards", "target_raw_reward", "comparator_raw_reward")
    return tuple(getattr(pair, name) for name in (*fields, *more))


class Scripted(Comparator):
    """Speaks with given texts: per item, per agent, candidate index to text."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    @contextmanager
    def session(self, team, phase):
        yield self

    def sample(self, items, item_indices, **options):
        return [
            TeamSample(
                index,
                [f"other prompt {item['prompt']}"] * 2,
                [{k: Response(text, [9], False) for k, text in agent.items()} for agent in self.script[index]],
            )
            for item, index in zip(items, item_indices, strict=True)
        ]


@pytest.mark.parametrize("limit", [None, 1, 5])
@pytest.mark.parametrize("round_number", [1, 3])
def test_base_run_keeps_the_widest_gaps_of_all_comparisons(team, limit, round_number):
    parts = make_collector(limit=limit).collect(team, ITEMS, INDICES, round_number)
    assert len(parts) == 3
    total = 0
    for part, (prompts, joint) in zip(parts, brute_samples(team, "actors", 6, round_number), strict=True):
        scores = {k: one_score(texts) for k, texts in joint.items()}
        expected = []
        for first, second in combinations(scores, 2):
            if scores[first] != scores[second]:
                winner, loser = sorted((first, second), key=lambda k: -scores[k])
                expected.append((-(scores[winner] - scores[loser]), winner, loser))
        expected = sorted(expected)[:limit]
        mean = sum(scores.values()) / 6
        assert [as_record(pair) for pair in part.pairs] == [
            (prompts, joint[won], joint[lost], scores[won], scores[lost], mean, [], None, None)
            for _, won, lost in expected
        ]
        assert part.actor_rewards == list(scores.values())
        assert part.comparator_rewards == []
        assert part.num_responses == 6
        total += len(expected)
    assert total >= 3


def test_base_pairs_hold_the_sampled_ids(team):
    samples = team.sample(ITEMS, INDICES, num_candidates=6, sampling=SAMPLING, seed=SEED, stream="actors", step=2)
    parts = make_collector().collect(team, ITEMS, INDICES, 2)
    checked = 0
    for part, sample in zip(parts, samples, strict=True):
        by_texts = {}
        for k in range(6):
            by_texts.setdefault(tuple(sample.completions(k)), []).append(sample.token_ids(k))
        for pair in part.pairs:
            assert pair.tokens.prompts == sample.prompt_ids
            assert pair.tokens.winner in by_texts[tuple(pair.winner_completions)]
            assert pair.tokens.loser in by_texts[tuple(pair.loser_completions)]
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(("selection", "limit"), [("comparator_reward", None), ("comparator_reward", 2), ("all", None)])
def test_iterative_run_compares_index_by_index(team, selection, limit):
    collector = make_collector(comparator=CurrentComparator(), selection=selection, limit=limit)
    parts = collector.collect(team, ITEMS, INDICES, 2)
    actors, others = brute_samples(team, "actors", 6, 2), brute_samples(team, "comparator", 6, 2)
    assert actors != others
    sides = set()
    for part, (prompts, mine), (_, theirs) in zip(parts, actors, others, strict=True):
        rows = []
        for k in range(6):
            a, c = one_score(mine[k]), one_score(theirs[k])
            if a == c:
                continue
            winner, loser = (mine[k], theirs[k]) if a > c else (theirs[k], mine[k])
            sides.add(a > c)
            key = (-c, -abs(a - c), k) if selection == "comparator_reward" else k
            rows.append((key, (prompts, winner, loser, max(a, c), min(a, c)), ([max(a, c), min(a, c)], a, c)))
        mean = fmean(map(one_score, [*mine.values(), *theirs.values()]))
        expected = [
            (*head, pytest.approx(mean, abs=1e-12), *tail) for _, head, tail in sorted(rows, key=lambda r: r[0])
        ]
        assert [as_record(pair) for pair in part.pairs] == expected[:limit]
        assert part.num_responses == 12
    assert sides == {True, False}


def test_indices_of_one_side_only_are_not_scored(team):
    asked = []

    def reward(first, second):
        asked.extend(zip(first, second, strict=True))
        return [float(len(a) * 10 + len(b)) for a, b in zip(first, second, strict=True)]

    # Item 4: index 1 lacks agent 1, index 9 is beyond the actors' six. Item 0: nothing. Item 7: nothing shared.
    script = {
        4: [{0: "xxxxx", 1: "lost", 3: "", 9: "far"}, {0: "y", 3: "", 9: "away"}],
        0: [{}, {}],
        7: [{8: "only"}, {8: "theirs"}],
    }
    collector = make_collector(reward, comparator=Scripted(script), selection="all")
    parts = collector.collect(team, ITEMS, INDICES, 1)
    (prompts, mine), *_ = brute_samples(team, "actors", 6, 1)
    assert sorted(asked) == sorted([tuple(mine[0]), tuple(mine[3]), ("xxxxx", "y"), ("", "")])
    assert [len(part.pairs) for part in parts] == [2, 0, 0]
    scores = [len(mine[0][0]) * 10.0 + len(mine[0][1]), len(mine[3][0]) * 10.0 + len(mine[3][1])]
    first, second = parts[0].pairs
    assert first.winner_completions == ["xxxxx", "y"]
    assert first.loser_completions == mine[0]
    assert second.winner_completions == mine[3]
    assert second.loser_completions == ["", ""]
    # The pair trains the actors: their prompts, not the comparator's.
    assert first.prompts == prompts
    mean = fmean([scores[0], scores[1], 51.0, 0.0])
    assert first.candidate_reward_mean == second.candidate_reward_mean == pytest.approx(mean, abs=1e-12)
    assert (first.target_raw_reward, first.comparator_raw_reward) == (scores[0], 51.0)
    assert (second.target_raw_reward, second.comparator_raw_reward) == (scores[1], 0.0)


@pytest.mark.parametrize("nothing", [None, float("nan"), float("inf")])
def test_fault_B39_B40_candidates_without_a_score_are_dropped_not_scored_zero(team, nothing):
    joint = brute_samples(team, "actors", 6, 1)
    lost = {tuple(joint[0][1][k]) for k in (1, 4)}

    def reward(*completions):
        scores = text_reward(*completions)
        return [
            nothing if texts in lost else s for texts, s in zip(zip(*completions, strict=True), scores, strict=True)
        ]

    collector = make_collector(reward)
    with pytest.warns(UserWarning, match="dropped") as caught:
        parts = collector.collect(team, ITEMS, INDICES, 1)
    assert sum("dropped" in str(warning.message) for warning in caught) == 1
    kept = {k: one_score(texts) for k, texts in joint[0][1].items() if tuple(texts) not in lost}
    assert len(kept) < 6
    used = {tuple(texts) for pair in parts[0].pairs for texts in (pair.winner_completions, pair.loser_completions)}
    assert used
    assert not used & lost
    assert parts[0].pairs[0].candidate_reward_mean == pytest.approx(fmean(kept.values()), abs=1e-12)
    assert parts[0].actor_rewards == list(kept.values())
    assert collector.oracle.num_dropped == sum(
        tuple(texts) in lost for _, texts_by_k in joint for texts in texts_by_k.values()
    )


def test_a_dropped_side_drops_the_comparison(team):
    script = {4: [{0: "u", 1: "v"}, {0: "u", 1: "v"}], 0: [{}, {}], 7: [{}, {}]}

    def reward(first, second):
        return [None if a == "u" else 5.0 if a == "v" else 1.0 for a in first]

    with pytest.warns(UserWarning, match="dropped"):
        parts = make_collector(reward, comparator=Scripted(script)).collect(team, ITEMS, INDICES, 1)
    (pair,) = parts[0].pairs
    assert pair.winner_completions == ["v", "v"]
    assert pair.candidate_reward_mean == 3.0  # index 1 alone is compared


@pytest.mark.parametrize("comparator", [None, CurrentComparator()])
def test_fault_B83_ties_are_no_pairs(team, comparator):
    parts = make_collector(lambda a, b: [2.0] * len(a), comparator=comparator).collect(team, ITEMS, INDICES, 1)
    assert [part.pairs for part in parts] == [[], [], []]
    assert parts[0].actor_rewards == [2.0] * 6


def test_a_processor_orders_pairs_and_raw_scores_are_kept(team):
    plain = make_collector(comparator=CurrentComparator(), selection="all").collect(team, ITEMS, INDICES, 1)
    flipped = make_collector(
        processor=lambda score: 100 - 2 * score, comparator=CurrentComparator(), selection="all"
    ).collect(team, ITEMS, INDICES, 1)
    for before, after in zip(plain, flipped, strict=True):
        assert len(before.pairs) == len(after.pairs) > 0
        for old, new in zip(before.pairs, after.pairs, strict=True):
            assert new.winner_completions == old.loser_completions
            assert new.winner_reward == 100 - 2 * old.loser_reward
            assert new.raw_rewards == [old.loser_reward, old.winner_reward]
            assert new.target_raw_reward == old.target_raw_reward
            assert new.comparator_raw_reward == old.comparator_raw_reward
            assert new.candidate_reward_mean == pytest.approx(100 - 2 * old.candidate_reward_mean, abs=1e-9)


def test_a_base_runs_processor(team):
    parts = make_collector(processor=lambda score: -score).collect(team, ITEMS, INDICES, 1)
    pair = parts[0].pairs[0]
    assert pair.winner_reward == -one_score(pair.winner_completions)
    assert (pair.raw_rewards, pair.target_raw_reward, pair.comparator_raw_reward) == ([], None, None)


def spied_samples(team, monkeypatch, collector, round_number):
    """What the actors said, item by item."""
    said, sample = [], team.sample

    def spy(*arguments, **options):
        result = sample(*arguments, **options)
        if options["stream"] == "actors":
            said.extend(result)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(team, "sample", spy)
        collector.collect(team, ITEMS, INDICES, round_number)
    return said


def test_the_comparators_count_changes_no_actor_sample(team, monkeypatch):
    expected = spied_samples(team, monkeypatch, make_collector(), 1)
    for count in (None, 1, 3, 40):
        comparator = CurrentComparator(num_candidates=count)
        assert spied_samples(team, monkeypatch, make_collector(comparator=comparator), 1) == expected
    assert spied_samples(team, monkeypatch, make_collector(), 2) != expected


def test_only_shared_indices_are_compared_when_counts_differ(team):
    for count, compared in ((2, 2), (9, 6)):
        comparator = CurrentComparator(num_candidates=count)
        parts = make_collector(comparator=comparator, selection="all").collect(team, ITEMS, INDICES, 1)
        assert all(len(part.actor_rewards) == len(part.comparator_rewards) == compared for part in parts)
        assert all(part.num_responses == 6 + count for part in parts)


def test_the_token_budget_changes_no_pair_and_progress_counts_items(team):
    small = SamplingConfig(temperature=1.0, top_p=1.0, top_k=8, max_new_tokens=2, token_budget=40)
    done = []
    collector = make_collector(sampling=small, comparator=CurrentComparator())
    parts = collector.collect(team, ITEMS, INDICES, 1, progress=done.append)
    whole = make_collector(comparator=CurrentComparator()).collect(team, ITEMS, INDICES, 1)
    assert [part.pairs for part in parts] == [part.pairs for part in whole]
    assert sum(done) == 3 * collector.sampling_passes() == 6


def test_random_selection_is_counted(team):
    def chosen(round_number):
        collector = make_collector(selection="random", limit=3)
        return [
            as_record(pair) for part in collector.collect(team, ITEMS, INDICES, round_number) for pair in part.pairs
        ]

    assert chosen(1) == chosen(1)
    widest = [as_record(p) for part in make_collector(limit=3).collect(team, ITEMS, INDICES, 1) for p in part.pairs]
    assert chosen(1) != widest


def test_an_item_does_not_depend_on_the_others(team):
    whole = make_collector(comparator=CurrentComparator()).collect(team, ITEMS, INDICES, 1)
    alone = make_collector(comparator=CurrentComparator()).collect(team, ITEMS[2:], INDICES[2:], 1)
    assert alone[0].pairs == whole[2].pairs
