"""What the C library does with memory that is freed: the updates of a CPU take the same gigabytes again and again."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of <malloc.h>


@cache
def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed, in one heap for all threads, instead of giving it back and taking it page by page.

    It holds for the rest of the process. Nothing is done with another C library, or where the environment says how
    memory is to be handled (``MALLOC_…`` or ``GLIBC_TUNABLES``).

    Returns:
        Whether it was done.
    """
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if told or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = [
        mallopt(_TRIM_THRESHOLD, -1),  # never gives back the end of the heap
        mallopt(_MMAP_MAX, 0),  # large pieces are of the heap, too
        mallopt(_ARENA_MAX, 1),  # all threads find in it what any has freed
    ]
    return all(done)
