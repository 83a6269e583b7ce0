"""The sandbox: hostile programs are contained, each by more than one guard; what is missing is said."""

import ctypes
import os
import socket
import subprocess
import sys
import time

import pytest

from pbrl_lightning.tasks.sandbox import Sandbox, SandboxError, Verdict

ALL = {"limits", "capabilities", "files", "syscalls", "namespaces"}
needs_all_guards = pytest.mark.skipif(
    sys.platform != "linux" or Sandbox().guards() != ALL, reason="this system lacks guards of the sandbox"
)


def run(body: str, *, without: tuple[str, ...] = (), **limits: float) -> Verdict:
    """The verdict on a program whose ``f()`` must return "contained"."""
    return Sandbox(without=without, **limits).examine(body, "f", "assert f() == 'contained'")


def contained(body: str, **options: object) -> bool:
    """True if the program's ``f`` lives to say that its attack failed."""
    return run(body, **options).all_passed


@pytest.fixture
def nothing_is_left(monkeypatch):
    """Says whether all process groups of this test's sandboxes are gone (the kernel may take a moment)."""
    groups = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            groups.append(self.pid)

    def gone(group):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    def look():
        patience = time.monotonic() + 3
        while not all(map(gone, groups)) and time.monotonic() < patience:
            time.sleep(0.01)
        return bool(groups) and all(map(gone, groups))

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return look


# ---- hostile programs: contained by all guards together, and by what is left where a container forbids some ----


def guards_left_out(*choices: tuple[str, ...]):
    """All guards, and slowly what a system may lack of them: each attack meets more than one."""
    rest = [pytest.param(choice, marks=pytest.mark.slow, id="without " + " ".join(choice)) for choice in choices]
    return pytest.mark.parametrize("without", [pytest.param((), id="all"), *rest])


@needs_all_guards
@guards_left_out(("namespaces",))
def test_hostile_fork_bomb(without, nothing_is_left):
    bomb = """
import os, subprocess, sys, threading, time
def tries():
    yield lambda: os.fork() or time.sleep(60)
    yield lambda: os.posix_spawn(sys.executable, ["python"], {})
    yield lambda: subprocess.Popen([sys.executable])
    yield lambda: os.execv(sys.executable, ["python"])
    yield lambda: threading.Thread(target=time.sleep, args=(60,)).start()
def f():
    for _ in range(20):
        for attack in tries():
            try:
                attack()
            except (OSError, RuntimeError):
                continue
            return "a process more"
    return "contained"
"""
    assert contained(bomb, without=without)
    assert nothing_is_left()


@pytest.mark.slow
@needs_all_guards
@guards_left_out(("namespaces",))
@pytest.mark.parametrize("loop", ["while True: pass", "time.sleep(1000)", "signal.pause()"])
def test_hostile_endless_loop(loop, without, nothing_is_left):
    started = time.monotonic()
    program = f"import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef f():\n    {loop}"
    verdict = run(program, without=without, cpu_seconds=1, wall_seconds=2)
    assert verdict.problem in ("it ended", "it took too long")
    assert not verdict.passed
    assert time.monotonic() - started < 6
    assert nothing_is_left()


@pytest.mark.slow
def test_an_endless_loop_while_the_program_is_loaded_and_one_in_the_tests(nothing_is_left):
    verdict = run("while True: pass", cpu_seconds=1, wall_seconds=2)
    assert (verdict.passed, verdict.total) == (0, 1)
    verdict = Sandbox(cpu_seconds=1, wall_seconds=2).examine("def f(): return 1", "f", "while True: pass\nassert True")
    assert (verdict.passed, verdict.total, verdict.problem) == (0, 1, "the tests did not end")
    assert nothing_is_left()


@pytest.mark.parametrize(
    "grab",
    [
        "bytearray(10 << 30)",
        "mmap.mmap(-1, 10 << 30)",
        pytest.param("[bytearray(1 << 24) for _ in range(640)]", marks=pytest.mark.slow),
    ],
)
def test_hostile_ten_gigabytes(grab):
    body = f"    try:\n        {grab}\n    except (MemoryError, OSError):\n        return 'contained'"
    assert contained(f"import mmap\ndef f():\n{body}")


@needs_all_guards
@guards_left_out(("namespaces",), ("syscalls",))
def test_hostile_writing_and_reading_outside(without, tmp_path):
    (tmp_path / "kept.txt").write_text("kept")
    os.chmod(tmp_path / "kept.txt", 0o644)
    os.chmod(tmp_path, 0o777)
    attacks = f"""
import os, pathlib, shutil
kept = pathlib.Path({str(tmp_path)!r}) / "kept.txt"
def tries():
    yield lambda: kept.read_text()
    yield lambda: os.listdir(kept.parent)
    yield lambda: kept.write_text("changed")
    yield lambda: open(kept, "a").write("changed")
    yield lambda: os.truncate(kept, 0)
    yield lambda: kept.unlink()
    yield lambda: kept.rename(kept.with_name("other"))
    yield lambda: (kept.parent / "new.txt").write_text("new")
    yield lambda: (kept.parent / "new").mkdir()
    yield lambda: os.symlink("/etc/passwd", kept.parent / "link")
    yield lambda: os.link(kept, "here")
    yield lambda: open("../outside.txt", "w")
    yield lambda: open("/dev/shm/pbrl", "w")
    yield lambda: open("/proc/self/oom_score_adj", "w")
    yield lambda: open("/etc/passwd").read()
def f():
    for number, attack in enumerate(tries()):
        try:
            attack()
        except OSError:
            continue
        return f"attack {{number}} went through"
    pathlib.Path("inside.txt").write_text("allowed")
    return "contained"
"""
    before = (tmp_path / "kept.txt").stat()
    assert contained(attacks, without=without)
    after = (tmp_path / "kept.txt").stat()
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert (tmp_path / "kept.txt").read_text() == "kept"
    assert (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns)


@pytest.mark.slow
@needs_all_guards
def test_owners_modes_and_times_of_files_stay(tmp_path):
    (tmp_path / "kept.txt").write_text("kept")
    attacks = f"""
import os
path = {str(tmp_path / "kept.txt")!r}
def f():
    for attack in (lambda: os.chmod(path, 0o600), lambda: os.utime(path, (0, 0)), lambda: os.chown(path, 1, 1),
                   lambda: os.setxattr(path, "user.a", b"b")):
        try:
            attack()
        except OSError:
            continue
        return "changed"
    return "contained"
"""
    assert contained(attacks)


@needs_all_guards
@guards_left_out(("namespaces",), ("syscalls",), ("syscalls", "namespaces"))
def test_hostile_network(without):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attack = f"""
import socket, urllib.request
def f():
    try:
        socket.create_connection(("127.0.0.1", {port}), timeout=1)
    except OSError:
        return "contained"
"""
        assert contained(attack, without=without)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.slow
@needs_all_guards
def test_no_socket_of_any_kind():
    kinds = "((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_INET6, socket.SOCK_STREAM), (socket.AF_UNIX, 1), (16, 3))"
    assert contained(
        "import socket\ndef f():\n"
        f"    for kind in {kinds}:\n"
        "        try:\n            socket.socket(*kind)\n"
        "        except OSError:\n            continue\n"
        "        return 'open'\n"
        "    return 'contained'"
    )


@needs_all_guards
@guards_left_out(("namespaces",), ("syscalls",), ("syscalls", "namespaces"))
def test_hostile_killing_its_parent(without):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        attack = f"""
import os, signal
def f():
    for pid in ({victim.pid}, os.getppid() or {victim.pid}):  # 0: a parent outside the namespace; it names a group here
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
        return "killed"
    return "contained"
"""
        assert contained(attack, without=without)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.slow
@needs_all_guards
@guards_left_out(("namespaces", "files"))
def test_a_signal_by_way_of_a_file_reaches_nobody(without):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        attack = f"""
import fcntl, os
def f():
    out, into = os.pipe()
    try:
        fcntl.fcntl(out, fcntl.F_SETOWN, {victim.pid})
        fcntl.fcntl(out, 10, 9)
        fcntl.fcntl(out, fcntl.F_SETFL, os.O_ASYNC)
        os.write(into, b"now")
    except OSError:
        return "contained"
"""
        assert contained(attack, without=without)
        with pytest.raises(subprocess.TimeoutExpired):
            victim.wait(0.1)
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.slow
@needs_all_guards
def test_it_cannot_leave_its_group_nor_signal_it():
    assert contained(
        "import os, signal\ndef f():\n"
        "    for attack in (os.setsid, lambda: os.setpgid(0, 0), lambda: os.killpg(0, signal.SIGKILL)):\n"
        "        try:\n            attack()\n"
        "        except OSError:\n            continue\n"
        "        return 'left'\n"
        "    return 'contained'"
    )


@needs_all_guards
def test_it_sees_no_environment_no_files_and_no_installed_packages(monkeypatch):
    monkeypatch.setenv("A_KEY", "canary")
    assert contained(
        "import os\ndef f():\n"
        "    assert not os.environ and os.listdir('.') == []\n"
        "    for name in ('pbrl_lightning', 'torch', 'numpy', 'writing'):\n"
        "        try:\n            __import__(name)\n"
        "        except ImportError:\n            continue\n"
        "        return name\n"
        "    return 'contained'"
    )


@pytest.mark.slow
def test_a_file_has_a_largest_size():
    body = (
        "def f():\n    try:\n        with open('a', 'wb') as file:\n            for _ in range(100):\n"
        "                file.write(bytes(1 << 16))\n    except OSError:\n        return 'contained'"
    )
    assert contained(body, file_kb=1024)


@pytest.mark.slow
@needs_all_guards
@pytest.mark.parametrize("without", [("namespaces",), ("namespaces", "syscalls"), ("namespaces", "syscalls", "files")])
def test_the_examiners_memory_and_files_are_out_of_reach(without):
    """It is not dumpable, and the program has no privilege: that alone holds, also where the user is root."""
    attack = """
import ctypes, os
def f():
    parent, libc = os.getppid(), ctypes.CDLL(None)
    if libc.ptrace(16, parent, 0, 0) == 0:
        return "attached"
    for name in ("mem", "fd/0", "fd/1", "environ", "maps"):
        try:
            open(f"/proc/{parent}/{name}", "rb")
        except OSError:
            continue
        return name
    return "contained"
"""
    assert contained(attack, without=without)


# ---- the sandbox itself ----


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"), reason="Linux only")
def test_what_needs_no_setting_of_the_system_is_in_force():
    """A guard that is broken would else only skip tests."""
    guards = Sandbox().guards()
    assert guards >= {"limits", "capabilities", "syscalls"}
    landlock = ctypes.CDLL(None).syscall(ctypes.c_long(444), None, ctypes.c_long(0), ctypes.c_long(1))
    assert ("files" in guards) == (landlock >= 1)


def test_what_is_missing_is_reported_and_what_is_required_comes_before_the_program(tmp_path):
    with pytest.warns(UserWarning, match=r"lacks guards.*`files`: it can read what you can read.*`namespaces`"):
        Sandbox()._check(frozenset({"limits", "capabilities", "syscalls"}))
    left_out = Sandbox(require=("files",), without=("files",))
    with pytest.raises(SandboxError, match=r"`require` names guards .* \['files'\]"):
        left_out.examine(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(): pass", "f", "assert f() is None")
    assert not (tmp_path / "ran").exists()
    left = Sandbox(without=("files", "namespaces")).guards()
    assert left <= {"limits", "capabilities", "syscalls"}


def test_options_out_of_range_are_named_together():
    with pytest.raises(
        ValueError, match=r"`cpu_seconds` must be >= 1, got 0; .*`require` must name guards .*\['walls'\]"
    ):
        Sandbox(cpu_seconds=0, require=("walls",))


@pytest.mark.slow
def test_tests_that_cannot_run_are_an_error_and_not_a_failure():
    for context, tests in (("", "assert ("), ("import no_such_module", "assert f()")):
        with pytest.raises(SandboxError, match=r"(?s)the tests of 'f' cannot be run: .*(SyntaxError|no_such_module)"):
            Sandbox().examine("def f(): return 1", "f", tests, context)


def test_a_sandbox_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="the sandbox could not be started"):
        Sandbox().examine("def f(): return 1", "f", "assert f()")


def test_an_interrupted_run_leaves_no_process_and_no_directory(monkeypatch, tmp_path, nothing_is_left):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    whole, calls = subprocess.Popen.communicate, []

    def interrupted(self, *args, **kwargs):
        calls.append(self.pid)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Sandbox().examine("def f(): return 1", "f", "assert f()")
    assert nothing_is_left()
    assert list(tmp_path.iterdir()) == []
