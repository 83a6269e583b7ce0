"""What keeps an untrusted process in: limits, namespaces, Landlock, a filter of system calls.

Standard library only, and nothing of this package: `_examiner.py` loads it in a bare interpreter. Each function returns
whether its guard is in force, so that what a system lacks is reported and not assumed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import struct
import sys
import sysconfig
from typing import Final

_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL, _SECCOMP_MODE_FILTER = 9, 2

# linux/landlock.h: rights of files, in bit order, and since which version of the interface they exist.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_FILE_RIGHTS: Final = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
_TCP_RIGHTS, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals

# Refused system calls: number on x86-64 (None: it has none there), on arm64. From 424 on they are the same everywhere.
_REFUSED: Final[dict[str, tuple[int | None, int | None]]] = {
    # processes and programs
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "setpgid": (109, 154), "setsid": (112, 157),
    # the network, and what else reaches other programs
    "socket": (41, 198), "socketpair": (53, 199), "bind": (49, 200), "listen": (50, 201), "connect": (42, 203),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "mq_open": (240, 180),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    # other processes
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # owners, modes and times of files, which Landlock leaves alone
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "open_by_handle_at": (304, 265), "memfd_create": (319, 279),
    # the kernel's more delicate parts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "personality": (135, 92), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_FIRST_UNKNOWN: Final = 470  # what Linux added after 6.17, and x86-64's calls in 32 bits, which have a high bit set
# fcntl's ways to have a signal sent to any process when a file is ready: F_SETOWN, F_SETSIG, F_SETOWN_EX.
_FCNTL, _REFUSED_COMMANDS = (72, 25), (8, 10, 15)

# linux/filter.h: load a word; jump if equal, if at least; return.
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x35, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_SECOND_ARGUMENT = 0, 4, 24  # in seccomp_data
_REFUSED_THEN: Final = -1  # for the place of the last instruction, until it is known
_ALLOW, _REFUSE_EPERM, _NO_SUCH_CALL, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000


def enter_namespaces() -> bool:
    """Network, IPC and user namespaces of its own for this process, and a process namespace for its children."""
    if sys.platform != "linux":
        return False
    rest = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWPID
    # Without privileges a user namespace comes first; a privileged container may lack those and have the others.
    return any(_libc().unshare(flags) == 0 for flags in (_CLONE_NEWUSER | rest, rest))


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int, processes: int | None) -> bool:
    """Hard limits on CPU time, address space, file size, open files and processes (None: as they are)."""
    wanted = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    held = True
    for kind, most in wanted.items():
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            held = False
    return held


def hide() -> None:
    """Keeps other processes of the same user out of this one's memory and open files."""
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that forked it ends."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def drop_capabilities() -> bool:
    """No privilege is left, and none can be gained, whoever the user is."""
    if sys.platform != "linux":
        return False
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this process
    dropped = _libc().capset(header, bytes(24)) == 0
    return bool(_prctl(_PR_SET_NO_NEW_PRIVS, 1) and dropped)


def restrict_files(directory: str) -> bool:
    """Landlock: reading Python's own library, reading and writing in ``directory``, and nothing else of the disk.

    Newer versions of it also refuse TCP and signals to processes outside.
    """
    version = _syscall(444, None, 0, 1) if sys.platform == "linux" else -1
    if version < 1:
        return False
    rights = sum(bits for since, bits in _FILE_RIGHTS.items() if since <= version)
    handled = struct.pack("=QQQ", rights, _TCP_RIGHTS, _SCOPES)
    size = 8 if version < 4 else 16 if version < 6 else 24  # fields of later versions are left off
    ruleset = _syscall(444, handled, size, 0)
    if ruleset < 0:
        return False
    read = _EXECUTE | _READ_FILE | _READ_DIR
    for path in library_paths():
        _allow(ruleset, path, read & rights)
    own = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    _allow(ruleset, directory, own & rights)
    _allow(ruleset, os.devnull, (_READ_FILE | _WRITE_FILE) & rights)
    restricted = _syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def library_paths() -> list[str]:
    """Where Python's standard library and the system's shared libraries lie, without any installed packages."""
    roots = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    own = {os.path.realpath(root) for root in roots}
    shared = [os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    found = ["/usr/share/zoneinfo", "/etc/localtime"]
    for root in own:
        found += [entry.path for entry in _entries(root) if entry.name not in ("site-packages", "dist-packages")]
    for root in {os.path.realpath(path) for path in shared} - own:
        found += [entry.path for entry in _entries(root) if not entry.name.startswith("python")]
    return found


def filter_syscalls() -> bool:
    """A seccomp filter: processes, programs, sockets, signals and the like are refused with "not permitted"."""
    known = _ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
    if known is None or sys.maxsize < 2**32 or not _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        return False
    program = _filter(*known)
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(instructions)))
    return _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _filter(column: int, architecture: int) -> list[tuple[int, int, int, int]]:
    """The filter's instructions: code, jump if true, jump if false, operand. The last one refuses."""
    numbers = sorted(number for pair in _REFUSED.values() if (number := pair[column]) is not None)
    program = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_EQUAL, 0, 2 + len(_REFUSED_COMMANDS), _FCNTL[column]),  # else over what concerns fcntl
        (_LOAD, 0, 0, _AT_SECOND_ARGUMENT),
        *((_JUMP_EQUAL, _REFUSED_THEN, 0, command) for command in _REFUSED_COMMANDS),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_FROM, 0, 1, _FIRST_UNKNOWN),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        *((_JUMP_EQUAL, _REFUSED_THEN, 0, number) for number in numbers),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE_EPERM),
    ]
    last = len(program) - 1  # jumps count from the next instruction, and go over 255 at most
    return [
        (code, last - place - 1 if then == _REFUSED_THEN else then, otherwise, operand)
        for place, (code, then, otherwise, operand) in enumerate(program)
    ]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, first: int, second: int = 0) -> bool:
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    return int(_libc().prctl(ctypes.c_int(option), *arguments)) == 0


def _syscall(number: int, *arguments: bytes | int | None) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return int(_libc().syscall(ctypes.c_long(number), *wide))


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Adds a rule for what lies at or under ``path``; what cannot be opened stays refused."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
    _syscall(445, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)


def _entries(root: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(root))
    except OSError:
        return []
