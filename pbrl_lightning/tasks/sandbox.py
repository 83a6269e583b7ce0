"""Runs untrusted programs against tests: guarded processes that end with their job, and a verdict they cannot write."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pbrl_lightning.utils.errors import RunError, raise_together

Guard = Literal["limits", "capabilities", "files", "syscalls", "namespaces"]

_LEFT_OPEN: Final[dict[str, str]] = {
    "limits": "CPU time, memory, open files or file size are not all limited",
    "capabilities": "a privileged user's program keeps its privileges",
    "files": "it can read what you can read, and write outside its directory",
    "syscalls": "it can start processes, use sockets and send signals unless another guard keeps it from that",
    "namespaces": "it shares network and process ids with the system, and only the other guards refuse their use",
}
# Not as a script, which would be compiled each time; last on the path, so that it hides no module.
_START: Final = "import sys; sys.path.append(sys.argv[1]); import _examiner; sys.path.pop(); _examiner.main()"
_GRACE_SECONDS: Final = 5.0  # beyond the program's own time: the interpreter's start, and the tests


class SandboxError(RunError):
    """The sandbox itself cannot work, or not with the guards that are required."""


@dataclass(frozen=True)
class Verdict:
    """What came of one program.

    Attributes:
        passed: Tests passed: ``assert`` statements that held.
        total: Tests there are.
        completed: True if the tests came to their end.
        problem: Why the first call without a value had none, empty if all had one. For people, not for rewards.
        guards: The guards that were in force.
    """

    passed: int
    total: int
    completed: bool
    problem: str
    guards: frozenset[str]

    @property
    def share(self) -> float:
        """Share of the tests that passed, in [0, 1]."""
        return self.passed / self.total if self.total else 0.0

    @property
    def all_passed(self) -> bool:
        """True if the tests came to their end and none failed."""
        return self.completed and 0 < self.total == self.passed


class Sandbox:
    """Runs a program and its tests in two processes of their own; the tests see only plain values of the program.

    Each job is a new process group with an empty environment and a temporary directory that is removed after it. In the
    process of the untrusted program these guards are put in force, each where the system has it:

    ============== ===================================================================================================
    `limits`       CPU time, address space, file size, open files, no core dumps, no further processes (rlimits)
    `capabilities` none are left and none can be gained, also where the user is root
    `files`        Landlock: reads Python's standard library, writes in its temporary directory, nothing else; from
                   Linux 6.7 on no TCP, from 6.12 on no signals to other processes
    `syscalls`     seccomp: no new processes or programs, sockets, signals, changes of file modes … (x86-64, arm64)
    `namespaces`   a network without devices, and process ids and IPC of its own
    ============== ===================================================================================================

    Linux 6.12 has all of them unless an administrator has switched some off; macOS has `limits` in part. What is
    missing is warned of once, with what it leaves open, and :attr:`Verdict.guards` says what was in force.

    It is no virtual machine, and guarantees less than one: a flaw of the kernel or of the interpreter's C code gets out
    of it; without `files` a program reads what you can read; until it ends it may fill the disk of its temporary
    directory with many files of ``file_kb``, and its CPU time slows other work. A program can learn what its function
    is called with, and so may answer known cases from a table. Run programs of people who mean you harm elsewhere.

    Args:
        cpu_seconds: CPU time of a program over all its tests.
        wall_seconds: The same in real time, so that one that sleeps ends too.
        memory_mb: Address space.
        file_kb: Most bytes of one file.
        require: Guards without which nothing is run.
        without: Guards that are left out, for tests of the others.

    Raises:
        ConfigurationError: If a limit is below 1 or a guard is unknown.
        SandboxError: If this is no system with process groups and rlimits.
    """

    def __init__(
        self,
        *,
        cpu_seconds: int = 2,
        wall_seconds: float = 10.0,
        memory_mb: int = 512,
        file_kb: int = 1024,
        require: tuple[Guard, ...] = (),
        without: tuple[Guard, ...] = (),
    ) -> None:
        limits = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory_mb": memory_mb, "file_kb": file_kb}
        wrong = [f"`{name}` must be >= 1, got {value}" for name, value in limits.items() if value < 1]
        for name, guards in (("require", require), ("without", without)):
            unknown = sorted(set(guards) - set(get_args(Guard)))
            wrong += [f"`{name}` must name guards of {list(get_args(Guard))}, got {unknown}"] if unknown else []
        raise_together(wrong)
        if os.name != "posix":
            raise SandboxError(f"the sandbox needs a POSIX system, best Linux; this is {sys.platform}")
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self.memory_mb = memory_mb
        self.file_kb = file_kb
        self.require = tuple(require)
        self.without = tuple(without)

    def examine(self, program: str, entry_point: str, tests: str, context: str = "") -> Verdict:
        """Runs ``tests``, in which calls of ``entry_point`` go to the untrusted ``program``.

        Arguments and values are plain data: None, numbers, text, bytes, lists, tuples, dicts, sets, ranges, and
        iterators of such. A value of another type fails its test. What a call changes in its arguments is not seen.

        Args:
            program: Source that defines ``entry_point``.
            entry_point: The function's name in the program and the tests.
            tests: Source with ``assert`` statements, each of them a test.
            context: Source that the tests need: imports, functions. It is not given to the program.

        Returns:
            The verdict; a program that ends early, hangs or breaks its limits fails the tests from there on.

        Raises:
            SandboxError: If the guarded processes cannot be started, a required guard is missing, or ``context`` or
                ``tests`` cannot be run at all.
        """
        job = {
            "program": program,
            "entry_point": entry_point,
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "memory_bytes": self.memory_mb << 20,
            "file_bytes": self.file_kb << 10,
            "require": self.require,
            "without": self.without,
        }
        said, errors, in_time = self._run(_frame(job) + _frame({"context": context, "tests": tests}))
        messages = _messages(said)
        if not messages:
            raise SandboxError(f"the sandbox could not be started: {errors.strip()[-2000:] or 'no reason was given'}")
        guards = frozenset(messages[0]["guards"])
        self._check(guards)
        if len(messages) > 1:
            return Verdict(**messages[1], guards=guards)
        if in_time and errors:  # the examiner's own error: the tests are wrong, not the program
            raise SandboxError(f"the tests of {entry_point!r} cannot be run: {errors.strip()[-2000:]}")
        written = sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(tests)))
        return Verdict(0, max(1, written), False, "the tests did not end", guards)

    def guards(self) -> frozenset[str]:
        """The guards that this system puts in force, found out by a program that does nothing."""
        return self.examine("def nothing(): pass", "nothing", "assert nothing() is None").guards

    def _run(self, job: bytes) -> tuple[bytes, str, bool]:
        """Runs the examiner on a job: its output, its errors, and whether it ended by itself."""
        # No site packages, no user's directory, nothing of the working directory.
        command = [sys.executable, "-S", "-s", "-P", "-X", "utf8", "-c", _START, str(Path(__file__).parent)]
        with tempfile.TemporaryDirectory(prefix="pbrl_sandbox_", ignore_cleanup_errors=True) as directory:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env={"PYTHONHASHSEED": "0"},  # sets in the same order each time; the program's environment is empty
                start_new_session=True,
            )
            try:
                said, errors = process.communicate(job, timeout=self.wall_seconds + _GRACE_SECONDS)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # the leader is not waited for yet: the id is its own
                said, errors = process.communicate()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return said, "", False
        return said, errors.decode(errors="replace"), process.returncode >= 0

    def _check(self, guards: frozenset[str]) -> None:
        missing = [guard for guard in get_args(Guard) if guard not in guards]
        required = [guard for guard in missing if guard in self.require]
        if required:
            raise SandboxError(f"`require` names guards that this system does not put in force: {required}")
        unexpected = [guard for guard in missing if guard not in self.without]
        if unexpected:
            text = "; ".join(f"`{guard}`: {_LEFT_OPEN[guard]}" for guard in unexpected)
            warnings.warn(f"this system lacks guards of the sandbox for untrusted programs. {text}", stacklevel=3)


def _frame(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "big") + text


def _messages(said: bytes) -> list[dict[str, Any]]:
    found = []
    while len(said) >= 8:
        size = int.from_bytes(said[:8], "big")
        found.append(json.loads(said[8 : 8 + size]))
        said = said[8 + size :]
    return found
