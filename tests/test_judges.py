"""Judges: what they ask, how strictly they read, what they ask once, and runs that learn from their comparisons."""

import asyncio
import re

import pytest

from fake_api import FakeApi
from pbrl_lightning import ApiEndpoint, CurrentComparator, PairwiseJudge, PreferenceJudge, ScoreJudge
from pbrl_lightning.preferences.oracle import Oracle, OracleError
from training_runs import EVAL_ITEMS, ITEMS, make_data, make_module, make_team, make_trainer, round_files, text_reward

FORMATS = ["generic", "openai", "anthropic", "openai_responses"]


def endpoint(api, api_format="openai", **options):
    quick = {"wait_initial": 0.01, "wait_max": 0.02, "timeout": 5.0}
    return ApiEndpoint(api.url_of(api_format), api_format, "judge-model", **{**quick, **options})


def says(text):
    """A judge that always says this; the number keeps its answers apart."""
    return lambda number, prompt, seen: f"I have read {number} answers.\n{text}"


def longer_wins(number, prompt, seen):
    """A judge that prefers the longer joint response, whichever side it stands on."""
    sides = [
        sum(map(len, re.findall(rf"### Answer {side}, response of agent \d\n(.*)", prompt))) for side in ("A", "B")
    ]
    verdict = "tie" if sides[0] == sides[1] else "A" if sides[0] > sides[1] else "B"
    return f"Thought {number}.\nBetter: {verdict}"


SCORES = {
    "Score: 7": 7.0,
    "score : 7.25": 7.25,
    "**Score: 3**": 3.0,
    "Good.\n\nScore: 10\n": 10.0,
    "Score = 0.": 0.0,
    "4": 4.0,
    " 4.5 \n": 4.5,
    '"Score: 2"': 2.0,
    "Score: 11": None,
    "Score: -1": None,
    "Score: 7/10": None,
    "Score: 7 or 8": None,
    "Score: seven": None,
    "I give it 7 of 10.": None,
    "Score: 7\nBut the second half is weak.": None,
    "Score: nan": None,
    "Score: 1e1": None,
    "": None,
    "Score:": None,
}


@pytest.mark.parametrize(("answer", "expected"), SCORES.items())
def test_a_score_is_read_strictly(answer, expected):
    assert ScoreJudge(ApiEndpoint("http://localhost/"), "brevity").parse(answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Better: A", 1.0),
        ("x\n**Better: b**", 0.0),
        ("Better: tie.", 0.5),
        ("Better: neither", None),
        ("A is better", None),
        ("Better: A\nor B", None),
        ("Better: A or B", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_strictly(answer, expected):
    assert PairwiseJudge(ApiEndpoint("http://localhost/"), "brevity").parse(answer) == expected


@pytest.mark.parametrize(
    ("judge", "options", "message"),
    [
        (ScoreJudge, {"criteria": " "}, "`criteria`"),
        (ScoreJudge, {"criteria": "x", "low": 1, "high": 1}, "`low` must be below `high`, got 1 and 1"),
        (ScoreJudge, {"criteria": "x", "attempts": 0}, "`attempts` must be >= 1, got 0"),
        (PairwiseJudge, {"criteria": "x", "max_new_tokens": 0}, "`max_new_tokens` must be >= 1, got 0"),
    ],
)
def test_wrong_options_are_named(judge, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        judge(ApiEndpoint("http://localhost/"), **options)


@pytest.mark.parametrize("api_format", FORMATS)
def test_a_score_judge_is_an_oracle_in_every_format(api_format):
    with FakeApi(write=says("Score: 6")) as api:
        oracle = Oracle(ScoreJudge(endpoint(api, api_format), "how brief they are", low=-5, high=8))
        scores = oracle.score(
            [{"prompt": "p"}] * 2, [3, 4], [["ask one"] * 2, ["ask two"] * 2], [["a", "b"], ["c", "d"]]
        )
    assert [score.value for score in scores] == [6.0, 6.0]
    assert len(api.requests) == 2
    question = next(seen.prompt for seen in api.requests if "\na\n" in seen.prompt)
    for part in ("how brief they are", "ask one", "ask two", "\na\n", "\nc\n", "from -5 (worst) to 8 (best)"):
        assert part in question
    assert "\nd\n" not in question


def test_equal_contents_are_asked_once_also_at_the_same_time():
    with FakeApi(write=says("Score: 6"), latency=0.05) as api:
        judge = ScoreJudge(endpoint(api), "brevity")
        oracle = Oracle(judge, max_concurrency=8)
        texts = ["a", "a", "b", "a"]
        for _ in range(2):  # the second time on another event loop
            scores = oracle.score([{}] * 4, [0, 1, 2, 3], [["p"] * 4], [texts])
            assert [score.value for score in scores] == [6.0] * 4
    assert len(api.requests) == 2


def test_an_unreadable_score_is_asked_for_again_and_then_dropped():
    answers = iter(["no number", "Score: 5", "still none", "and none", "Score: 1"])
    with FakeApi(write=lambda number, prompt, seen: next(answers)) as api:
        oracle = Oracle(ScoreJudge(endpoint(api), "brevity"), max_concurrency=1)
        with pytest.warns(UserWarning, match="gave None for task item 8"):
            scores = oracle.score([{}] * 3, [7, 8, 9], [["p"] * 3], [["a", "b", "c"]])
    assert [score and score.value for score in scores] == [5.0, None, 1.0]
    assert oracle.num_dropped == 1


def test_a_judge_that_cannot_be_reached_stops_with_the_items_index():
    with FakeApi("401") as api:
        oracle = Oracle(ScoreJudge(endpoint(api), "brevity"))
        with pytest.raises(OracleError, match=r"ApiRejectedError for task item 5 .*answered 401"):
            oracle.score([{}], [5], [["p"]], [["a"]])
    assert len(api.requests) == 1


@pytest.mark.parametrize("api_format", FORMATS)
def test_a_pairwise_judge_is_asked_twice_with_sides_swapped(api_format):
    with FakeApi(write=longer_wins) as api:
        judge = PairwiseJudge(endpoint(api, api_format), "length")

        async def ask():
            async with judge:
                options = {"prompts": ["one", "two"], "item": {}}
                return [
                    await judge.compare(["aa", "a"], ["a", "a"], **options),
                    await judge.compare(["a", "a"], ["aa", "a"], **options),
                    await judge.compare(["a", "aa"], ["aa", "a"], **options),
                    await judge.compare(["a", "a"], ["a", "a"], **options),
                ]

        assert asyncio.run(ask()) == [1.0, 0.0, 0.5, 0.5]
    # Two for the first; the second is the same two the other way round; two for the tie; none for equal texts.
    assert len(api.requests) == 4


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["A", "A"], 0.5),
        (["B", "B"], 0.5),
        (["A", "tie"], 0.5),
        (["A", "B"], 1.0),
        (["tie", "tie"], 0.5),
        (["A"], None),
    ],
)
def test_a_contradiction_is_a_tie_and_half_an_answer_is_none(verdicts, expected):
    answers = [*verdicts, "?", "?"]

    def write(number, prompt, seen):
        # Which of the two questions it is, not which came first.
        swapped = prompt.index("first text") > prompt.index("second text")
        return f"{number}\nBetter: {answers[int(swapped)]}"

    with FakeApi(write=write) as api:
        judge = PairwiseJudge(endpoint(api), "x")
        compared = judge.compare(["first text"], ["second text"], prompts=["p"], item={})
        assert asyncio.run(compared) == expected


class Alphabet(PreferenceJudge):
    """Prefers the joint response that comes later in the alphabet, by their first characters; counts."""

    def __init__(self, nothing=()):
        self.asked, self.nothing = [], nothing

    async def compare(self, first, second, *, prompts, item):
        self.asked.append((item["prompt"], *first, *second))
        assert len(prompts) == len(first) == len(second) == 2
        await asyncio.sleep(0)
        if item["prompt"] in self.nothing:
            return None
        keys = ["".join(side) for side in (first, second)]
        return 0.5 if keys[0] == keys[1] else float(keys[0] > keys[1])


def records(tmp_path):
    return [record for file in round_files(tmp_path / "replay").values() for record in file["pairs"]]


@pytest.mark.parametrize("iterative", [True, False], ids=["iterative", "base"])
def test_a_run_learns_from_a_judges_comparisons(tmp_path, iterative):
    judge = Alphabet()
    data = make_data(text_reward, iterative=iterative, judge=judge, replay_dir=str(tmp_path / "replay"))
    module = make_module(make_team(), rounds=2 if iterative else None, num_train_epochs=1)
    make_trainer(tmp_path, max_epochs=None).fit(module, data)
    found = records(tmp_path)
    assert found
    for record in found:
        winner, loser = ("".join(record[side]) for side in ("winner_completions", "loser_completions"))
        assert winner > loser or not iterative
        assert 0 <= record["loser_reward"] < record["winner_reward"] <= 1
    comparisons = 4 if iterative else 6  # an index each, or every two of four candidates
    assert len(judge.asked) == (2 if iterative else 1) * len(ITEMS) * comparisons


def test_in_a_base_run_the_score_is_the_share_of_won_comparisons(tmp_path):
    data = make_data(
        text_reward, iterative=False, judge=Alphabet(), replay_dir=str(tmp_path / "replay"), pair_selection="all"
    )
    make_trainer(tmp_path).fit(make_module(make_team(), num_train_epochs=1), data)
    by_item = {}
    for record in records(tmp_path):
        group = by_item.setdefault(record["prompts"][0], {})
        for side in ("winner", "loser"):
            group["".join(record[f"{side}_completions"])] = record[f"{side}_reward"]
    assert by_item
    for scores in by_item.values():
        assert sorted(scores, key=scores.get) == sorted(scores)  # later in the alphabet wins more


def test_comparisons_without_a_verdict_are_left_out_and_counted(tmp_path):
    team = make_team()
    data = make_data(text_reward, judge=Alphabet(nothing=("b",)), replay_dir=str(tmp_path / "replay"))
    with pytest.warns(UserWarning, match="no verdict on two responses to task item 1"):
        make_trainer(tmp_path).fit(make_module(team, rounds=1), data)
    assert team.counts["judge_without_verdict"] == 4
    assert {record["prompts"][0] for record in records(tmp_path)} <= {"a", "c"}


@pytest.mark.parametrize("verdict", [2, -0.1, "A", True, float("nan")])
def test_a_judge_that_gives_no_share_is_named(tmp_path, verdict):
    class Broken(PreferenceJudge):
        async def compare(self, first, second, *, prompts, item):
            return verdict

    with pytest.raises(OracleError, match=r"`Broken.compare` must return a number from 0 to 1 or None, got"):
        make_trainer(tmp_path).fit(make_module(make_team(), rounds=1), make_data(text_reward, judge=Broken()))


def test_a_judge_needs_no_reward_but_evaluation_and_policies_do(tmp_path):
    data = make_data(None, judge=Alphabet(), eval_items=None)
    make_trainer(tmp_path).fit(make_module(make_team(), rounds=1), data)
    assert data.rounds[0].collected_pairs
    with pytest.raises(ValueError, match="`reward_func` must be given with `eval_items`"):
        make_data(None, judge=Alphabet(), eval_items=EVAL_ITEMS)


def test_a_run_with_a_remote_pairwise_judge(tmp_path):
    with FakeApi(write=longer_wins) as api:
        judge = PairwiseJudge(endpoint(api), "length")
        data = make_data(
            text_reward,
            comparator=CurrentComparator(),
            judge=judge,
            replay_dir=str(tmp_path / "replay"),
            num_candidates=8,
            max_concurrency=4,
        )
        make_trainer(tmp_path).fit(make_module(make_team(), rounds=1), data)
    assert api.most_in_flight <= 8  # two questions a comparison
    for record in records(tmp_path):
        assert sum(map(len, record["winner_completions"])) > sum(map(len, record["loser_completions"]))
