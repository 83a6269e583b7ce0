"""The examiner: what counts as passed, what crosses between the processes, and that no program writes its verdict."""

import secrets

import pytest

from pbrl_lightning.tasks._examiner import CallError, decode, encode
from pbrl_lightning.tasks.sandbox import Sandbox

RECIPROCALS = ("def f(x): return 1 / x", "def f(x): return 1 / x if x else 0")


def test_a_program_that_is_right_passes_and_one_that_is_wrong_does_not():
    tests = "assert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]\nassert add('a', 1)"
    verdict = Sandbox().examine("def add(a, b):\n    return a + b", "add", tests)
    assert (verdict.passed, verdict.total, verdict.completed) == (2, 3, True)
    assert verdict.problem == "it raised TypeError"
    assert not verdict.all_passed
    assert verdict.share == 2 / 3
    assert Sandbox().examine("def add(a, b):\n    return a - b", "add", "assert add(1, 2) == 3").share == 0.0


@pytest.mark.slow
def test_tests_in_a_function_with_a_loop_and_a_context():
    tests = (
        "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == twice(n)\n"
        "    assert candidate(5)\ncheck(f)"
    )
    verdict = Sandbox().examine("def f(n): return 2 * n", "f", tests, "def twice(n): return 2 * n")
    assert (verdict.passed, verdict.total, verdict.all_passed) == (4, 4, True)


@pytest.mark.slow
def test_tests_that_stop_early_are_not_passed_and_count_what_was_left():
    tests = "assert f(0) == 1\nvalue = f('x') + 1\nassert value == 2\nassert f(1) == 2\nassert f(2) == 3"
    verdict = Sandbox().examine("def f(n): return n + 1", "f", tests)
    assert (verdict.passed, verdict.total, verdict.completed) == (1, 4, False)
    assert not verdict.all_passed


def test_asserts_of_constants_are_no_tests_but_a_false_one_that_is_reached_fails():
    tests = (
        "assert True, 'runs'\nassert f(1) == 1\nassert 1 + 1 == 2\n"
        "try:\n    f(0)\nexcept ZeroDivisionError:\n    assert True\nelse:\n    assert False"
    )
    raises, guarded = (Sandbox().examine(program, "f", tests) for program in RECIPROCALS)
    assert (raises.passed, raises.total, raises.completed) == (1, 1, True)
    assert (guarded.passed, guarded.total, guarded.completed) == (1, 2, True)
    never = Sandbox().examine("def f(x): raise KeyError", "f", "assert True\nassert f(1) == 1\nassert True, 'end'")
    assert (never.passed, never.total, never.share) == (0, 1, 0.0)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(10**40), 2.5, float("inf"), 1 + 2j, "text \ud800 ß", b"\x00\xff", [1, [2]], (1, (2,)), (), {},
        {1: "a", (2, 3): [None]}, {1, 2}, set(), frozenset({"a"}), range(3, 9, 2),
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_go_there_and_back(value):
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


def test_iterators_go_as_iterators_and_other_objects_do_not():
    assert list(decode(encode(map(str, [1, 2])))) == ["1", "2"]
    for value in (object(), len, {"a": {1: object()}}, type):
        with pytest.raises(CallError, match="is not plain data"):
            encode(value)


@pytest.mark.slow
def test_what_a_subclass_says_of_itself_does_not_cross():
    class Claims(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert type(decode(encode(Claims(1)))) is int
    assert (
        not Sandbox()
        .examine(
            "class C(str):\n    def __eq__(self, other): return True\n    def __str__(self): return 'right'\n"
            "def f(): return C('wrong')",
            "f",
            "assert f() == 'right'",
        )
        .passed
    )


# ---- cheats: what a program does to pass without the right value ----

FIND = r"re.search(rb'SECRET-[0-9a-f]{32}', text)"  # what the tests expect, if the program could get at it

CHEATS = {
    "prints": """
print('1 passed')
print('{"passed": 9, "total": 9, "completed": true, "problem": ""}')
def f(): print('passed')
""",
    "exits while loading": "import sys\nsys.exit(0)",
    "exits when called": "import sys\ndef f(): sys.exit(0)",
    "leaves by os._exit while loading": "import os\nos._exit(0)",
    "leaves by os._exit": "import os\ndef f(): os._exit(0)",
    "equals everything": """
class E(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(): return E()
""",
    "patches the exception": """
import builtins
class A(BaseException): pass
builtins.AssertionError = A
def f(): return 1
""",
    "patches all and bool": "import builtins\nbuiltins.all = builtins.bool = lambda *_: True\ndef f(): return 1",
    "patches JSON": """
import json
json.dumps = lambda *_: '{"passed": 9, "total": 9, "completed": true, "problem": ""}'
def f(): return 1
""",
    "patches the script": """
import sys
module = sys.modules['_examiner']
module.examine = module.decode = lambda *_: {'passed': 9, 'total': 9, 'completed': True, 'problem': ''}
def f(): return 1
""",
    "writes to all descriptors": """
import json, os
text = json.dumps({'passed': 2, 'total': 2, 'completed': True, 'problem': ''}).encode()
for fd in range(64):
    try:
        os.write(fd, len(text).to_bytes(8, 'big') + text)
    except OSError:
        pass
def f(): return 1
""",
    "reads all descriptors": f"""
import os, re
def f():
    for fd in range(64):
        try:
            os.set_blocking(fd, False)
            text = os.read(fd, 1 << 16)
            if {FIND}: return {FIND}[0].decode()
        except OSError:
            pass
""",
    "looks into its callers and all objects": f"""
import gc, re, sys
def f():
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for thing in gc.get_objects():
        seen += gc.get_referents(thing)
    for thing in seen:
        if isinstance(thing, (str, bytes)):
            text = thing if isinstance(thing, bytes) else thing.encode(errors='replace')
            if {FIND}: return {FIND}[0].decode()
""",
    "reads other processes": f"""
import os, re
def f():
    for pid in (os.getppid(), os.getppid() + 1, 1, 'self'):
        for name in ('fd/0', 'mem', 'maps', 'environ', 'cmdline'):
            try:
                text = open(f'/proc/{{pid}}/{{name}}', 'rb').read(1 << 16)
                if {FIND}: return {FIND}[0].decode()
            except (OSError, ValueError):
                pass
""",
    "nests deeply": "def f():\n    value = []\n    for _ in range(900): value = [value]\n    return value",
    "returns too much": "def f(): return 'a' * (1 << 22)",
    "replies with nonsense": "import os\nos.write(4, (3).to_bytes(8, 'big') + b'{]x')\ndef f(): return 1",
    "replies with an odd tag": """
import os
text = b'["value", {"range": ["a"], "set": 3}]'
os.write(4, len(text).to_bytes(8, 'big') + text)
def f(): return 1
""",
    "announces a long reply": "import os\nos.write(4, (1 << 62).to_bytes(8, 'big'))\ndef f(): return 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_cheat(program):
    secret = secrets.token_hex(16)
    verdict = Sandbox().examine(program, "f", f"assert f() == 'SECRET-{secret}'\nassert f() == 'SECRET-{secret}'")
    assert (verdict.passed, verdict.total) == (0, 2)


def test_a_raised_stop_iteration_does_not_end_a_tests_loop():
    program = "def f(x):\n    raise StopIteration"
    verdict = Sandbox().examine(program, "f", "assert all(map(f, [1]))\nassert list(map(f, [1])) == []")
    assert (verdict.passed, verdict.total) == (0, 2)


@pytest.mark.slow
def test_long_numbers_and_dataclasses_are_ordinary():
    program = (
        "from __future__ import annotations\nimport dataclasses, math\n"
        "@dataclasses.dataclass\nclass P:\n    x: int = 1\ndef f(): return math.factorial(P().x + 2999)"
    )
    assert Sandbox().examine(program, "f", "import math\nassert f() == math.factorial(3000)").all_passed


def test_tests_may_expect_an_exception():
    tests = "try:\n    f(-1)\nexcept ValueError:\n    ok = True\nassert ok"
    assert Sandbox().examine("def f(x):\n    raise ValueError('no')", "f", tests).all_passed


@pytest.mark.slow
def test_a_verdict_is_the_same_each_time():
    program = "import random\ndef f(): return [list({'a', 'b', 'c', 'd'}), random.random(), hash('x')]"
    first = Sandbox().examine(program, "f", "assert str(f()) < 'n'\nassert hash(str(f())) % 2\nassert f()[1] < 0.5")
    assert first == Sandbox().examine(
        program, "f", "assert str(f()) < 'n'\nassert hash(str(f())) % 2\nassert f()[1] < 0.5"
    )
