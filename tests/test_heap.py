"""Freed memory of CPU updates is kept by the process."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from pbrl_lightning import heap
from pbrl_lightning.modules import base
from training_runs import make_module, make_trainer

# The faults of taking ten pieces of 40 MiB once more, after they were freed: 102,400 pages of 4 KiB. No torch: that
# takes seconds to import.
TAKE_AGAIN = f"""
import ctypes, resource, runpy
done = runpy.run_path({heap.__file__!r})["keep_freed_memory"]()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def faults_of_taking():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [ctypes.c_void_p(libc.malloc(40 * 2**20)) for _ in range(10)]
    for piece in pieces:
        ctypes.memset(piece, 1, 40 * 2**20)
    for piece in pieces:
        libc.free(piece)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_taking(), faults_of_taking()
print(done, faults_of_taking())
"""


def taken_again(**said):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", TAKE_AGAIN]
    done = subprocess.run(command, env=environment | said, capture_output=True, text=True, timeout=120, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_is_freed_is_taken_again_without_a_page_fault():
    kept, faults = taken_again()
    assert kept == "True"
    assert faults < 1_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("said", [{"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=0"}])
def test_what_the_environment_says_holds(said):
    kept, faults = taken_again(**said)
    assert kept == "False"
    assert faults > 90_000


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert heap.keep_freed_memory.__wrapped__() is False


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_run_on_a_cpu_asks_for_it(tmp_path, monkeypatch, device):
    asked = []
    monkeypatch.setattr(base, "keep_freed_memory", lambda: asked.append(True))
    module = make_module()
    module.trainer = make_trainer(tmp_path)
    module.trainer.strategy._root_device = torch.device(device)
    module.configure_model()
    assert asked == [True] * (device == "cpu")
