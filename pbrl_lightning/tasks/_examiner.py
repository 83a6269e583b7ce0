"""Runs the tests of one program, of which it sees nothing but plain values. For a bare interpreter.

Two processes. The *worker* is forked first, guarded, and runs the untrusted program. The *examiner* reads the tests
only then, so that they are not in the worker's copy of its memory. Where a test calls the function, the arguments go to
the worker and its value comes back, both as plain data, and the comparison is made here: what the program prints,
patches or redefines, how it exits and what its objects claim to be equal to decides nothing. The verdict goes to the
standard output, which the worker does not have.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import io
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_MOST_BYTES = 1 << 20
_MOST_ELEMENTS = 100_000
_REQUESTS, _REPLIES = 3, 4  # the worker's descriptors
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter,
    "range": lambda bounds: range(*bounds), "complex": lambda parts: complex(*parts), "bytes": bytes,
}  # fmt: skip


class CallError(Exception):
    """The program gave no value for a call: it ended, took too long, or returned something that is not plain data."""


def encode(value: Any) -> Any:
    """A plain value as JSON's types; other types than these are refused.

    Example:
        >>> encode((1, {"a": {2}}))
        {'tuple': [1, {'dict': [['a', {'set': [2]}]]}]}
    """
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list):
        return [encode(entry) for entry in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(entry)] for key, entry in dict.items(value)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(entry) for entry in value]}
    if isinstance(value, Iterator):
        return {"iterator": [encode(entry) for entry, _ in zip(value, range(_MOST_ELEMENTS), strict=False)]}
    raise CallError(f"a value of type {type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    """The value that :func:`encode` was given.

    Example:
        >>> decode(encode(({1: 2.5}, [b"x"], range(3), None)))
        ({1: 2.5}, [b'x'], range(0, 3), None)
    """
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, entries),) = value.items()
    if kind == "dict":
        return {decode(key): decode(entry) for key, entry in entries}
    return _SEQUENCES[kind]([decode(entry) for entry in entries])


def main() -> None:
    """One job from the standard input: what the worker needs, then what only the examiner may know."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.set_int_max_str_digits(_MOST_ELEMENTS)
    guards = _load_guards()
    job = json.loads(_read_frame(0))
    without = set(job["without"])
    job["active"] = ["namespaces"] if "namespaces" not in without and guards.enter_namespaces() else []
    guards.limit(job["cpu_seconds"] + 2, job["memory_bytes"], job["file_bytes"], None)
    guards.hide()
    worker = Worker(job, guards, without)
    try:
        _say({"guards": json.loads(worker.receive())})
        exam = json.loads(_read_frame(0))
        _say(examine(exam["context"], exam["tests"], job["entry_point"], worker))
    finally:
        worker.kill()
    os.killpg(0, signal.SIGKILL)  # this process too, and what a program started where nothing refused it


def examine(context: str, tests: str, entry_point: str, worker: Worker) -> dict[str, Any]:
    """Runs the tests; every ``assert`` that names something is one, and one that fails does not end the others.

    A true ``assert`` of constants (HumanEval's ``assert True, "…"``) says nothing about the program and does not
    count; a false one that is reached (``else: assert False``) is a test that failed.

    Returns:
        ``passed`` and ``total`` tests, whether the tests came to their end (``completed``), and the first ``problem``.
    """
    outcomes: list[bool] = []

    def record(test: Callable[[], Any]) -> None:
        try:
            outcomes.append(bool(test()))
        except Exception:
            outcomes.append(False)

    tree = ast.parse(tests)
    written = sum(isinstance(node, ast.Assert) and not _is_constant(node) for node in ast.walk(tree))
    tree = ast.fix_missing_locations(_Recorded().visit(tree))
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(context, "<context>", "exec"), namespace)
    namespace |= {entry_point: worker.call, "_record_": record}
    completed = True
    try:
        exec(compile(tree, "<tests>", "exec"), namespace)
    except BaseException:
        completed = False
    total = len(outcomes) if completed else max(written, len(outcomes) + 1)
    return {"passed": sum(outcomes), "total": total, "completed": completed, "problem": worker.problem}


def _is_constant(node: ast.Assert) -> bool:
    return not any(isinstance(part, ast.Name) for part in ast.walk(node.test))


class _Recorded(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call: ast.stmt = ast.Expr(ast.Call(ast.Name("_record_", ast.Load()), [ast.Lambda(nothing, node.test)], []))
        if _is_constant(node):
            call = ast.If(ast.UnaryOp(ast.Not(), node.test), [call], [])
        return ast.copy_location(call, node)


class Worker:
    """The process that runs the program, as the examiner sees it.

    Attributes:
        problem: Why the first call without a value had none; empty if all had one.
    """

    def __init__(self, job: dict[str, Any], guards: Any, without: set[str]) -> None:
        self.problem = ""
        self._lost = False
        self._deadline = time.monotonic() + job["wall_seconds"]
        requests, self._to = os.pipe()
        self._from, replies = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _work(job, guards, without, requests, replies)
            finally:
                os._exit(1)
        os.close(requests)
        os.close(replies)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value for these arguments; what it raises is raised again, if it is a built-in exception."""
        request = json.dumps([encode(args), encode(kwargs)]).encode()
        try:
            if self._lost:  # a late reply would be taken for that to another call
                raise CallError(self.problem)
            _write_frame(self._to, request)
            kind, content = json.loads(self.receive())
            if kind == "value":
                return decode(content)
        except Exception as error:
            self._lost = True
            self.problem = self.problem or (str(error) if isinstance(error, CallError) else "the reply makes no sense")
            raise CallError(self.problem) from error
        said = str(content)[:80]
        self.problem = self.problem or (said if kind == "refused" else f"it raised {said}")
        raise _raised(said)

    def receive(self) -> bytes:
        """The worker's next message."""
        size = int.from_bytes(self._read(8), "big")
        if size > _MOST_BYTES:
            raise CallError("it returned too much")
        return self._read(size)

    def kill(self) -> None:
        """Ends the worker, whatever it does."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _read(self, size: int) -> bytes:
        read = b""
        while len(read) < size:
            ready, _, _ = select.select([self._from], [], [], max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise CallError("it took too long")
            piece = os.read(self._from, size - len(read))
            if not piece:
                raise CallError("it ended")
            read += piece
        return read


def _raised(name: str) -> Exception:
    """The built-in exception of this name, or a CallError."""
    kind = getattr(builtins, name, None)
    # A StopIteration would end a test's own loop early, and so pass for its end.
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        with contextlib.suppress(TypeError):  # some need arguments
            return kind()
    return CallError(name)


def _work(job: dict[str, Any], guards: Any, without: set[str], requests: int, replies: int) -> NoReturn:
    """The forked side: guards first, then the program, then one call after the other."""
    os.dup2(requests, 20)
    os.dup2(replies, 21)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.dup2(20, _REQUESTS)
    os.dup2(21, _REPLIES)
    os.closerange(5, 256)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    guards.die_with_parent()
    steps: dict[str, Callable[[], bool]] = {
        "limits": lambda: guards.limit(job["cpu_seconds"], job["memory_bytes"], job["file_bytes"], 0),
        "capabilities": guards.drop_capabilities,
        "files": lambda: guards.restrict_files(os.getcwd()),
        "syscalls": guards.filter_syscalls,  # the last: it would refuse what the others do
    }
    active = job["active"] + [name for name, step in steps.items() if name not in without and step()]
    _write_frame(_REPLIES, json.dumps(active).encode())
    if set(job["require"]) <= set(active):
        _answer(job["program"], job["entry_point"])
    os._exit(1)


def _answer(program: str, entry_point: str) -> NoReturn:
    os.environ.clear()
    sys.argv[:] = ["program"]
    sys.dont_write_bytecode = True
    if "random" in program:  # else it costs more than most programs
        importlib.import_module("random").seed(0)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    namespace = module.__dict__
    exec(compile(program, "<program>", "exec"), namespace)
    while True:
        args, kwargs = (decode(part) for part in json.loads(_read_frame(_REQUESTS)))
        try:
            reply = json.dumps(["value", encode(namespace[entry_point](*args, **kwargs))])
        except CallError as error:
            reply = json.dumps(["refused", str(error)])
        except Exception as error:
            reply = json.dumps(["error", type(error).__name__])
        _write_frame(_REPLIES, reply.encode())


def _read_frame(descriptor: int) -> bytes:
    def read(size: int) -> bytes:
        pieces = b""
        while len(pieces) < size:
            piece = os.read(descriptor, size - len(pieces))
            if not piece:
                raise EOFError("the other side has ended")
            pieces += piece
        return pieces

    return read(int.from_bytes(read(8), "big"))


def _write_frame(descriptor: int, content: bytes) -> None:
    message = memoryview(len(content).to_bytes(8, "big") + content)
    while message:
        message = message[os.write(descriptor, message) :]


def _say(content: dict[str, Any]) -> None:
    _write_frame(1, json.dumps(content).encode())


def _load_guards() -> Any:
    """`_guards.py` beside this file, without the package around it, which would import torch."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_guards.py")
    spec = importlib.util.spec_from_file_location("_guards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
