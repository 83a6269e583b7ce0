"""Coding together: one agent writes a helper function, the other the main function that uses it (HumanEval, MBPP).

Both are asked at once and see the task only, not each other's answers; the helper's name and arguments are agreed in
the prompts. The reward runs what they wrote, in :class:`pbrl_lightning.tasks.sandbox.Sandbox`, and only if asked to.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.tasks.rows import load_rows, packaged_rows
from pbrl_lightning.tasks.sandbox import Sandbox, Verdict
from pbrl_lightning.utils.errors import ConfigurationError

HELPER: Final = "aux"
"""The helper's name."""

_FENCE: Final = "```"
_MOST_CHARACTERS: Final = 20_000
_STUB: Final = f"def {HELPER}(*args, **kwargs):\n    return None\n"
_ITEM_KEYS: Final = {"id", "prompt", "entry_point", "context", "tests"}
_HELD_OUT: Final = 4


def as_item(row: TaskItem) -> TaskItem:
    r"""A row of HumanEval or MBPP as the task item of this module; such an item is given back as it is.

    Args:
        row: With ``prompt, entry_point, test`` (HumanEval), or ``prompt`` or ``text``, ``code, test_list`` (MBPP;
            ``test_imports`` or ``test_setup_code`` where there are any).

    Returns:
        ``id``; ``prompt``; ``entry_point``, the function to write; ``context``, source that program and tests may use;
        ``tests``, source whose ``assert`` statements are the tests. No solution.

    Raises:
        ConfigurationError: If the row is of neither form.

    Example:
        >>> row = {"task_id": 7, "prompt": "Add one.", "code": "def inc(x): ...", "test_list": ["assert inc(1) == 2"]}
        >>> item = as_item(row)
        >>> item["entry_point"], item["prompt"]
        ('inc', 'Add one.\n\nFor example: assert inc(1) == 2')
    """
    if row.keys() >= _ITEM_KEYS:
        return row
    number = str(row.get("task_id", ""))
    if row.keys() >= {"prompt", "entry_point", "test"}:
        name = row["entry_point"]
        tests = f"{row['test']}\n\ncheck({name})\n"
        return {
            "id": number,
            "prompt": row["prompt"],
            "entry_point": name,
            "context": _context(row["prompt"], name),
            "tests": tests,
        }
    if row.keys() >= {"code", "test_list"} and row.keys() & {"prompt", "text"}:
        asked = "prompt" if "prompt" in row else "text"
        setup = row.get("test_imports") or row.get("test_setup_code") or []
        tests = "\n".join(row["test_list"])
        return {
            "id": number,
            "prompt": f"{row[asked]}\n\nFor example: {row['test_list'][0]}",
            "entry_point": _tested_function(row["code"], row["test_list"][0]),
            "context": setup if isinstance(setup, str) else "\n".join(setup),
            "tests": tests,
        }
    raise ConfigurationError(
        f"a coding item must have {sorted(_ITEM_KEYS)}, or be a row of HumanEval (prompt, entry_point, test) or of "
        f"MBPP (prompt or text, code, test_list), got {sorted(row)}"
    )


def load_items(source: str, split: str = "test", limit: int | None = None) -> list[TaskItem]:
    """Coding items from a file or the hub: ``HumanEval.jsonl.gz``, ``datasets:openai/openai_humaneval`` and the like.

    Args:
        source: As in :func:`pbrl_lightning.tasks.rows.load_rows`.
        split: Split of a data set.
        limit: Number of leading rows, None for all.
    """
    return [as_item(row) for row in load_rows(source, split, limit)]


def train_items() -> list[TaskItem]:
    """The packaged rows of MBPP and HumanEval but for the last four of each, for ``data.items`` by import path."""
    return [
        as_item(row) for name in ("mbpp", "humaneval") for row in packaged_rows(f"coding_{name}.jsonl")[:-_HELD_OUT]
    ]


def eval_items() -> list[TaskItem]:
    """The last four packaged rows of MBPP and of HumanEval, for ``data.eval_items`` by import path."""
    return [
        as_item(row) for name in ("mbpp", "humaneval") for row in packaged_rows(f"coding_{name}.jsonl")[-_HELD_OUT:]
    ]


def helper_prompt(item: TaskItem) -> list[dict[str, str]]:
    """Asks for the helper: chat messages of the first agent."""
    return _prompt(item, "Write only the helper function `{helper}`: it does a useful part of the work. ")


def main_prompt(item: TaskItem) -> list[dict[str, str]]:
    """Asks for the main function: chat messages of the second agent."""
    return _prompt(item, "Write only the function `{main}`: it calls `{helper}` and uses its value. ")


FORMATTERS: Final = [helper_prompt, main_prompt]
"""The two roles in the order of the reward's arguments (helper, main). For YAML, by import path."""


def _prompt(item: TaskItem, role: str) -> list[dict[str, str]]:
    item = as_item(item)
    shared = (
        "Two programmers solve a task in Python without talking to each other. One writes the helper function "
        "`{helper}`, which takes the same arguments as `{main}`; the other writes `{main}`, which calls it. "
    )
    how = (shared + role + "Answer with Python code only.").format(helper=HELPER, main=item["entry_point"])
    return [{"role": "system", "content": how}, {"role": "user", "content": item["prompt"]}]


def extract_code(answer: str, name: str) -> str:
    r"""The code of an answer: its first fenced block that defines ``name``, else all blocks, else all of it.

    Example:
        >>> extract_code("Here it is:\n```python\ndef f(x):\n    return x\n```\nIt returns x.", "f")
        'def f(x):\n    return x\n'
    """
    blocks = _fenced_blocks(answer)
    return next((block for block in blocks if defines(block, name)), "\n".join(blocks) or answer)


def _fenced_blocks(answer: str) -> list[str]:
    """What lies between fences, without the line of the opening one; an unclosed block ends with the answer."""
    blocks = []
    opening = answer.find(_FENCE)
    while opening >= 0:
        line_end = answer.find("\n", opening + len(_FENCE))
        if line_end < 0:
            break
        closing = answer.find(_FENCE, line_end + 1)
        blocks.append(answer[line_end + 1 : closing if closing >= 0 else None])
        opening = answer.find(_FENCE, closing + len(_FENCE)) if closing >= 0 else -1
    return blocks


def defines(code: str, name: str) -> bool:
    """True if the code parses and defines a function of this name at its top level.

    Example:
        >>> defines("def f(x): return x", "f"), defines("def f(x) return x", "f"), defines("f = 1", "f")
        (True, False, False)
    """
    tree = _parsed(code)
    return tree is not None and any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def refers_to(code: str, name: str) -> bool:
    r"""True if the code reads ``name`` and never binds it: it means a function from elsewhere.

    Example:
        >>> refers_to("def f(x): return aux(x)", "aux"), refers_to("def f(x): return x  # not aux", "aux")
        (True, False)
        >>> refers_to("def aux(x): return x\ndef f(x): return aux(x)", "aux")
        False
    """
    tree = _parsed(code)
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    read = any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in nodes)
    return read and not any(name in _bound(node) for node in nodes)


@dataclass(frozen=True)
class CodingOutcome:
    """What came of one joint response.

    Attributes:
        helper_parses: The helper's code parses and defines the helper.
        main_parses: The main function's code parses and defines it.
        tests: Share of the tests that passed, 0 where one of the two does not parse.
        solved: All tests passed.
        helper_used: Some test that passed fails when the helper returns None instead.
    """

    helper_parses: bool
    main_parses: bool
    tests: float = 0.0
    solved: bool = False
    helper_used: bool = False

    @property
    def levels(self) -> tuple[float, float, float]:
        """Parsing, tests, cooperation, each in [0, 1]; a level counts only if the one before is reached."""
        parsing = (self.helper_parses + self.main_parses) / 2
        return parsing, self.tests, self.tests if self.helper_used else 0.0


@dataclass(frozen=True)
class _CodePair:
    item: TaskItem
    helper: str
    main: str
    parses: tuple[bool, bool]
    names_helper: bool

    @classmethod
    def read(cls, item: TaskItem, helper: str, main: str) -> _CodePair:
        name = item["entry_point"]
        helper, main = extract_code(helper, HELPER), extract_code(main, name)
        return cls(item, helper, main, (defines(helper, HELPER), defines(main, name)), refers_to(main, HELPER))


class CodingReward:
    """Do the two functions parse, pass the tests, and need each other? A sum of three levels in [0, 1].

    =========== ======================================================================================================
    parsing     half for each answer that parses and defines its function
    tests       share of the tests that pass; only if both parse
    cooperation the same share once more, if the main function really uses the helper: it names it, does not define it
                itself, and fewer tests pass when the helper's value is None
    =========== ======================================================================================================

    The programs run in a sandbox, and only if ``execute="sandbox"`` asks for it: they are written by a model, and no
    sandbox of an ordinary process is perfect (see :class:`pbrl_lightning.tasks.sandbox.Sandbox`). Equal texts give
    equal rewards as long as the programs neither measure time nor run close to its limits.

    Args:
        execute: Must be ``"sandbox"``.
        sandbox: Its limits and the guards that it insists on; default ``Sandbox()``.
        workers: Programs run at once.

    Raises:
        ConfigurationError: If ``execute`` is not ``"sandbox"`` or ``workers`` is below 1.
    """

    reward_range: tuple[float, float] = (0.0, 3.0)

    def __init__(
        self, execute: Literal["sandbox"] | None = None, sandbox: Sandbox | None = None, workers: int = 2
    ) -> None:
        if execute != "sandbox":
            raise ConfigurationError(
                f"`execute` must be 'sandbox', got {execute!r}: this reward runs programs that a model wrote, which is "
                "off unless asked for by name. Read what the sandbox guarantees (docs/tasks.md), then give "
                "`execute='sandbox'`"
            )
        if workers < 1:
            raise ConfigurationError(f"`workers` must be >= 1, got {workers}")
        self.execute = execute
        self.sandbox = sandbox or Sandbox()
        self.workers = workers

    def __call__(self, helper: list[str], main: list[str], *, batch_items: Sequence[TaskItem]) -> list[float]:
        """Rewards of B joint responses.

        Args:
            helper: The first agent's answers, length B.
            main: The second agent's answers, length B.
            batch_items: Their task items, length B.

        Returns:
            B rewards in [0, 3].
        """
        return [sum(outcome.levels) for outcome in self.outcomes(helper, main, batch_items)]

    def outcomes(
        self, helper: Sequence[str], main: Sequence[str], batch_items: Sequence[TaskItem]
    ) -> list[CodingOutcome]:
        """What came of B joint responses; equal ones run once.

        Raises:
            ConfigurationError: If the lengths differ or an item is of no known form.
            SandboxError: If the sandbox cannot work.
        """
        if not len(helper) == len(main) == len(batch_items):
            raise ConfigurationError(
                f"`helper`, `main` and `batch_items` must have one entry per joint response, got {len(helper)}, "
                f"{len(main)} and {len(batch_items)}"
            )
        items = [as_item(item) for item in batch_items]
        keys = [(item["entry_point"], item["tests"], *pair) for item, *pair in zip(items, helper, main, strict=True)]
        different = dict(zip(keys, items, strict=True))
        # Read here: parsing silences warnings, and that is for one thread only.
        pairs = [_CodePair.read(item, *key[2:]) for key, item in different.items()]
        with ThreadPoolExecutor(self.workers) as pool:
            found = dict(zip(different, pool.map(self._outcome, pairs), strict=True))
        return [found[key] for key in keys]

    def _outcome(self, pair: _CodePair) -> CodingOutcome:
        if not all(pair.parses):
            return CodingOutcome(*pair.parses)
        verdict = self._examine(pair.item, pair.helper, pair.main)
        used = False
        if verdict.passed and pair.names_helper:
            used = self._examine(pair.item, _STUB, pair.main).passed < verdict.passed
        return CodingOutcome(*pair.parses, verdict.share, verdict.all_passed, used)

    def _examine(self, item: TaskItem, helper: str, main: str) -> Verdict:
        program = "\n\n".join([item["context"], helper, main])
        return self.sandbox.examine(program, item["entry_point"], item["tests"], item["context"])


class CodingMetrics:
    """Metrics of evaluation, for ``data.eval_metrics``: shares of the joint responses.

    ``pass_rate`` (all tests passed), ``tests_passed`` (mean share of the tests), ``helper_parses``, ``main_parses`` and
    ``helper_used``. The programs run once more, in the sandbox of ``reward``.

    Args:
        execute: As in :class:`CodingReward`.
        sandbox: The same.
        workers: The same.
    """

    def __init__(
        self, execute: Literal["sandbox"] | None = None, sandbox: Sandbox | None = None, workers: int = 2
    ) -> None:
        self.reward = CodingReward(execute, sandbox, workers)

    def __call__(self, helper: list[str], main: list[str], *, batch_items: Sequence[TaskItem]) -> dict[str, float]:
        """The metrics of B joint responses; empty if there are none."""
        outcomes = self.reward.outcomes(helper, main, batch_items)
        if not outcomes:
            return {}
        columns: dict[str, Sequence[float]] = {
            "pass_rate": [outcome.solved for outcome in outcomes],
            "tests_passed": [outcome.tests for outcome in outcomes],
            "helper_parses": [outcome.helper_parses for outcome in outcomes],
            "main_parses": [outcome.main_parses for outcome in outcomes],
            "helper_used": [outcome.helper_used for outcome in outcomes],
        }
        return {name: sum(values) / len(outcomes) for name, values in columns.items()}


def _parsed(code: str) -> ast.Module | None:
    if len(code) > _MOST_CHARACTERS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes and the like
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _bound(node: ast.AST) -> set[str]:
    """Names that a node binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.arg):
        return {node.arg}
    return {node.asname or node.name} if isinstance(node, ast.alias) else set()


def _context(prompt: str, name: str) -> str:
    """What stands in a HumanEval prompt beside the function to write: imports, functions that it may use."""
    body = [node for node in ast.parse(prompt).body if getattr(node, "name", None) != name]
    return "\n".join(ast.unparse(node) for node in body)


def _tested_function(code: str, test: str) -> str:
    """The function of the reference solution that a test calls."""
    defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    called = [
        node.func.id
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    found = [name for name in called if name in defined]
    if not found:
        raise ConfigurationError(f"the test {test!r} calls none of the functions {sorted(defined)} of the row's `code`")
    return found[0]
