"""The oracle: alignment, kinds of numbers, dropped candidates, errors, async functions, import paths."""

from __future__ import annotations

import asyncio
import functools
import math
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from pbrl_lightning.preferences.oracle import Oracle, OracleError, Score
from pbrl_lightning.preferences.selection import base_pairs

ITEMS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]
INDICES = [5, 6, 7, 8]
PROMPTS = [[f"h{agent}/{i}" for i in range(4)] for agent in range(2)]
COMPLETIONS = [[f"y{agent}/{i}" for i in range(4)] for agent in range(2)]


def run(reward_func, processor=None, count=4, **kwargs):
    oracle = Oracle(reward_func, processor, **kwargs)
    prompts, completions = [p[:count] for p in PROMPTS], [c[:count] for c in COMPLETIONS]
    return oracle, oracle.score(ITEMS[:count], INDICES[:count], prompts, completions)


def values(scores):
    return [None if score is None else score.value for score in scores]


def constant(returned):
    """A reward function that gives the same thing whatever it is asked."""

    def score(*completions):
        return returned

    return score


def test_each_agent_is_one_argument():
    def score(first, second):
        assert first == COMPLETIONS[0]
        assert second == COMPLETIONS[1]
        return [0.0, 1.0, 2.0, 3.0]

    assert run(score)[1] == [Score(0.0, 0.0), Score(1.0, 1.0), Score(2.0, 2.0), Score(3.0, 3.0)]


def test_no_joint_response_makes_no_call():
    def score(*completions):
        raise AssertionError

    assert Oracle(score).score([], [], [[], []], [[], []]) == []


class WithAll:
    def __call__(self, *completions, **extras):
        assert extras == {"prompts": PROMPTS, "batch_items": ITEMS}
        return [1] * 4


class OnlyItems:
    def __call__(self, first, second, *, batch_items):
        assert batch_items == ITEMS
        return [1] * 4


class Forward(torch.nn.Module):
    def forward(self, first, second):
        return torch.ones(4)


def unreadable(*completions, **extras):
    assert not extras
    return [1] * 4


unreadable.__signature__ = "not a signature"


@pytest.mark.parametrize("function", [WithAll(), OnlyItems(), Forward(), unreadable, functools.partial(OnlyItems())])
def test_keywords_are_given_where_the_signature_has_them(function):
    assert values(run(function)[1]) == [1.0] * 4


def test_only_prompts_are_given():
    def score(*completions, prompts):
        assert prompts == PROMPTS
        return [1] * 4

    assert values(run(score)[1]) == [1.0] * 4


def test_a_positional_only_name_is_no_keyword():
    def score(prompts, batch_items, /):
        assert prompts == COMPLETIONS[0]
        return [1] * 4

    assert values(run(score)[1]) == [1.0] * 4


def test_the_function_cannot_change_our_lists():
    def score(first, second):
        first.clear()
        second.append("x")
        return [1] * 4

    run(score)
    assert [len(column) for column in COMPLETIONS] == [4, 4]


def test_lists_must_be_aligned():
    oracle = Oracle(constant([1.0]))
    with pytest.raises(ValueError, match=r"`completions` must have 1 entries, one per task item, got 1, 2"):
        oracle.score([{}], [0], [["p"], ["p"]], [["a"], ["a", "b"]])
    with pytest.raises(ValueError, match=r"`item_indices` must have 1 entries.*got 0"):
        oracle.score([{}], [], [["p"]], [["a"]])


CONTAINERS = [
    [1, 0.5, True, -2],
    (1, 0.5, True, -2),
    np.array([1, 0.5, 1, -2], dtype=np.float32),
    np.array([1, 0.5, True, -2], dtype=object),
    np.array([[1.0], [0.5], [1.0], [-2.0]]),
    torch.tensor([1, 0.5, 1, -2], requires_grad=True),
    torch.tensor([1, 0.5, 1, -2], dtype=torch.bfloat16),
    torch.tensor([[1.0], [0.5], [1.0], [-2.0]]),
]


@pytest.mark.parametrize("returned", CONTAINERS, ids=lambda r: type(r).__name__)
def test_accepted_containers(returned):
    scores = run(constant(returned))[1]
    assert values(scores) == [1.0, 0.5, 1.0, -2.0]
    assert all(type(score.value) is float and type(score.raw) is float for score in scores)


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(1.5, requires_grad=True),
        torch.tensor([1.5]),
        torch.tensor([[1.5]], dtype=torch.bfloat16),
        np.float32(1.5),
        np.array(1.5),
        np.array([1.5]),
        np.array([Decimal("1.5")]),
        Decimal("1.5"),
        Fraction(3, 2),
    ],
    ids=lambda n: f"{type(n).__name__}",
)
def test_fault_B93_every_kind_of_number_becomes_a_plain_float(number):
    scores = run(constant([number, True, np.bool_(False), np.int64(7)]))[1]
    assert values(scores) == [1.5, 1.0, 0.0, 7.0]
    assert all(type(score.value) is float for score in scores)


def test_fault_B39_none_and_nan_drop_only_their_candidates():
    with pytest.warns(UserWarning, match=r"`constant.<locals>.score` gave None for task item 6: .*dropped"):
        oracle, scores = run(constant([1.0, None, float("nan"), 2.0]))
    assert values(scores) == [1.0, None, None, 2.0]
    assert oracle.num_dropped == 2
    kept = {index: score.value for index, score in enumerate(scores) if score is not None}
    assert [(pair.winner, pair.loser) for pair in base_pairs(kept, "all", None)] == [(3, 0)]


@pytest.mark.parametrize(
    "hole",
    [None, math.nan, math.inf, -math.inf, 10**400, Decimal("sNaN"), Decimal("Infinity"), torch.tensor(math.nan)],
    ids=str,
)
def test_everything_that_is_no_finite_number_is_dropped(hole):
    with pytest.warns(UserWarning, match="not scored 0"):
        oracle, scores = run(constant([hole, 1.0, 2.0, 3.0]))
    assert values(scores) == [None, 1.0, 2.0, 3.0]
    assert oracle.num_dropped == 1


def test_dropping_is_warned_of_once_per_oracle():
    with pytest.warns(UserWarning, match="task item 5") as caught:
        oracle, _ = run(constant([None] * 4))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oracle.score(ITEMS, INDICES, PROMPTS, COMPLETIONS)
    assert oracle.num_dropped == 8


def test_fault_B40_an_unscored_candidate_is_not_a_zero_among_negative_rewards():
    with pytest.warns(UserWarning, match="gave None"):
        _, scores = run(constant([-5.0, None, -4.0, -5.0]))
    kept = {index: score.value for index, score in enumerate(scores) if score is not None}
    pairs = base_pairs(kept, "reward_gap", None)
    assert {pair.winner for pair in pairs} == {2}
    assert sum(kept.values()) / len(kept) == pytest.approx(-14 / 3)


def test_fault_B41_the_answer_column_arrives_aligned():
    def score(first, second, batch_items):
        return [
            float(item["answer"]) + float(text.split("/")[1]) for item, text in zip(batch_items, first, strict=True)
        ]

    assert values(run(score)[1]) == [0.0, 2.0, 4.0, 6.0]


WRONG = [
    ([], "0 in list"),
    ([1.0] * 3, "3 in list"),
    ([1.0] * 5, "5 in list"),
    (torch.ones(1, 4), "1 in Tensor"),
    (1.0, "float 1.0"),
    (torch.tensor(1.0), "Tensor"),
    (np.float32(1), "float32"),
    (np.array(1.0), "ndarray"),
    ((x for x in [1.0] * 4), "generator"),
    ("1234", "str '1234'"),
    ({0: 1, 1: 1, 2: 1, 3: 1}, "dict"),
    (None, "NoneType None"),
]


@pytest.mark.parametrize(("returned", "got"), WRONG, ids=[got for _, got in WRONG])
def test_fault_B41_wrong_count_or_container_names_expected_and_got(returned, got):
    expected = r"`constant.<locals>.score` must return a list, tuple, tensor or array of 4 numbers"
    with pytest.raises(OracleError, match=f"{expected}, got {got}.* for task items 5 to 8"):
        run(constant(returned))


@pytest.mark.parametrize(
    "element",
    ["1.0", [1.0, 2.0], {}, 1j, torch.ones(2), np.ones(2), object()],
    ids=lambda element: type(element).__name__,
)
def test_a_wrong_element_is_named_with_its_item(element):
    with pytest.raises(OracleError, match=r"of 4 numbers, got an element that is \w+ .* for task item 7") as caught:
        run(constant([1.0, 2.0, element, 3.0]))
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_exception_is_chained():
    def broken(*completions):
        raise KeyError("answer")

    message = r"`test_an_exception.*broken` raised KeyError for task items 5 to 8 \(4 numbers expected\): 'answer'"
    with pytest.raises(OracleError, match=message) as caught:
        run(broken)
    assert isinstance(caught.value.__cause__, KeyError)


def test_ctrl_c_is_not_swallowed():
    def interrupted(*completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)


def test_a_coroutine_from_a_plain_function_is_an_error_and_closed():
    async def inner():
        return [1.0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OracleError, match="got coroutine"):
            run(lambda *completions: inner())


def test_the_processor_maps_each_score_and_raw_is_kept():
    oracle, scores = run(constant([1, 2, 3, 4]), lambda raw: torch.tensor(10 * raw))
    assert scores == [Score(10.0, 1.0), Score(20.0, 2.0), Score(30.0, 3.0), Score(40.0, 4.0)]
    assert oracle.num_dropped == 0


def test_what_the_processor_cannot_map_is_dropped():
    with pytest.warns(UserWarning, match="<lambda>` gave nan for task item 6"):
        oracle, scores = run(constant([1, 0, None, 2]), lambda raw: 1 / raw if raw else math.nan)
    assert values(scores) == [1.0, None, None, 0.5]
    assert oracle.num_dropped == 2


def test_a_failing_processor_names_itself_the_score_and_the_item():
    with pytest.raises(
        OracleError, match=r"<lambda>` raised ZeroDivisionError on the score 0.0 of task item 6"
    ) as caught:
        run(constant([1, 0, 1, 1]), lambda raw: 1 / raw)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(
        OracleError, match=r"<lambda>` must return 1 number, got str 'high' for the score 1.0 of task item 5"
    ):
        run(constant([1, 0, 1, 1]), lambda raw: "high")


class Judge:
    """An async oracle that answers the first question last and counts calls in flight."""

    def __init__(self):
        self.flying = self.most = self.calls = 0

    async def __call__(self, first, second, *, prompts, batch_items):
        assert len(first) == len(second) == len(batch_items) == 1
        assert [len(column) for column in prompts] == [1, 1]
        self.calls += 1
        self.flying += 1
        self.most = max(self.most, self.flying)
        index = int(batch_items[0]["answer"])
        await asyncio.sleep(0.01 * (4 - index))
        self.flying -= 1
        assert first == [f"y0/{index}"]
        return [index]


@pytest.mark.parametrize("limit", [1, 2, 8])
def test_an_async_oracle_runs_concurrently_up_to_the_limit_in_order(limit):
    judge = Judge()
    assert values(run(judge, max_concurrency=limit)[1]) == [0.0, 1.0, 2.0, 3.0]
    assert judge.calls == 4
    assert judge.most == min(limit, 4)


def test_an_async_oracle_works_beside_a_running_loop():
    async def notebook():
        return run(Judge())[1]

    assert values(asyncio.run(notebook())) == [0.0, 1.0, 2.0, 3.0]


def test_an_async_function_and_a_partial_of_it():
    async def judge(scale, first, second):
        return [scale * float(first[0].split("/")[1])]

    assert values(run(functools.partial(judge, 2.0))[1]) == [0.0, 2.0, 4.0, 6.0]
    assert values(run(functools.partial(Judge()))[1]) == [0.0, 1.0, 2.0, 3.0]


def test_async_errors_name_the_one_item():
    async def broken(*completions, batch_items):
        if batch_items[0]["answer"] == "2":
            raise TimeoutError("too slow")
        return [1.0]

    async def scalar(*completions):
        return 1.0

    with pytest.raises(
        OracleError, match=r"broken` raised TimeoutError for task item 7 \(1 number expected\)"
    ) as caught:
        run(broken)
    assert isinstance(caught.value.__cause__, TimeoutError)
    with pytest.raises(OracleError, match=r"array of 1 number, got float 1.0 for task item 5"):
        run(scalar)


def test_names_for_messages():
    assert Oracle(Judge()).reward_name == "Judge"
    assert Oracle(functools.partial(math.fsum)).reward_name == "fsum"


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"`reward_func` must be a callable or an import path, got int 3"):
        Oracle(3)
    with pytest.raises(TypeError, match=r"`reward_processor` must be a callable"):
        Oracle(math.fsum, 3)
    with pytest.raises(ValueError, match=r"`reward_func`: 'nowhere:f': there is no module `nowhere`"):
        Oracle("nowhere:f")
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match=r"`max_concurrency` must be an integer >= 1"):
            Oracle(math.fsum, max_concurrency=wrong)
