"""How fast is it, how much of the machine's limit, and how many times as fast as the peer?

    python benchmarks/speed.py [--only sampling madpo …] [--peer PYTHON] [--repeats 3] [--out FILE.json]

Measures collections, updates, policy steps, whole rounds, the memory of teams and the replay of long histories on
SmolLM2-135M with two agents, 4 items, 48 new tokens per response (EOS disabled), prompts of about 17 and 299 tokens.
Prints a table and writes it, with every single time, as JSON. With the peer it takes most of an hour on two cores.

Columns: *seconds* is the median of the timed calls, after others to warm up; short ones are timed five times, or until
twenty seconds of them are spent. *of the limit* is useful FLOP/s over the rate of the same matrix products in the same
minute (`speed_parts/limit.py` defines both). *peer* is CoMLRL 1.4.3 on the same items, prompts, lengths and candidate
counts in fp32, run by the interpreter that `--peer` names, in turns with ours; *ratio* is how many times as good as the
peer we are (time, or peak memory). Precisions: *bf16* holds the weights in bfloat16, *mixed* float32 weights with
matrix products in bfloat16, in training (autocast) and in sampling (`sampling.dtype`); their ratio is to the peer's
fp32. On a CPU that emulates bfloat16 both are left out unless `--precisions` asks for them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speed_parts.bench import Bench
from speed_parts.learning import madpo, policy, reward_model, sampling
from speed_parts.memory import memory
from speed_parts.peer import Peer
from speed_parts.replay import replay
from speed_parts.rounds import whole_round
from speed_parts.rows import Rows, header, line
from speed_parts.workload import Workload, save_endless
from transformers.utils import logging as transformers_logging

from pbrl_lightning.acceleration.precision import is_emulated
from pbrl_lightning.heap import keep_freed_memory

ENTRIES = ("sampling", "madpo", "reward", "policy", "round", "memory", "replay")


def entry(name: str, bench: Bench, peer_of: Callable[[], Peer] | None) -> Rows:
    """The rows of one entry."""
    functions: dict[str, Callable[[Bench], Rows]] = {
        "sampling": sampling,
        "madpo": madpo,
        "reward": reward_model,
        "policy": policy,
        "round": whole_round,
        "memory": partial(memory, peer_of=peer_of),
        "replay": replay,
    }
    return functions[name](bench)


def machine(threads: int) -> dict[str, Any]:
    """Where the numbers come from."""
    found = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in found.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg(),  # above the threads, someone else worked here too
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def run(options: argparse.Namespace) -> Rows:
    """Measures row after row."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as every fit on a CPU does
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    with tempfile.TemporaryDirectory(prefix="pbrl_speed_") as directory:
        save_endless(Path(directory), options.tiny)
        work = Workload.tiny(directory) if options.tiny else Workload(directory)
        lengths = tuple(length for length in work.prompt_lengths if length[0] in options.lengths)
        work = replace(work, prompt_lengths=lengths)
        peer_of = partial(Peer, options.peer, directory, options.threads) if options.peer else None
        for name in options.only:
            # A peer per entry: it holds its last trainer, which the next entry has no use for.
            peer = peer_of() if peer_of is not None and name not in ("memory", "replay") else None
            try:
                precisions, candidates = tuple(options.precisions), tuple(options.candidates)
                bench = Bench(work, options.repeats, precisions, peer, candidates, beside=not options.goals)
                yield from entry(name, bench, peer_of)
            finally:
                if peer is not None:
                    peer.close()


def main() -> None:
    """Prints the table and writes the JSON, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENTRIES, metavar="NAME", help=", ".join(ENTRIES))
    parser.add_argument(
        "--goals",
        action="store_true",
        help="only rows that have a number to beat: no LoRA, no items apart, and, where not said otherwise, "
        "--only sampling madpo reward policy --precisions fp32 --candidates few",
    )
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16", "mixed"), help="see above")
    parser.add_argument("--candidates", nargs="+", choices=("few", "many"), help="8 or 32 per item; both")
    parser.add_argument("--lengths", nargs="+", choices=("short", "long"), default=("short", "long"), help="of prompts")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has comlrl==1.4.3")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side (2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls per row (3)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small sizes: does it run at all?")
    parser.add_argument("--out", type=Path, default=Path("runs/speed.json"))
    options = parser.parse_args()
    if options.tiny and options.peer:
        parser.error("--tiny has no peer: its model has no token to spare for EOS")
    options.only = options.only or (ENTRIES[:4] if options.goals else ENTRIES)
    fp32_only = options.goals or is_emulated(torch.bfloat16, "cpu")
    options.precisions = options.precisions or (("fp32",) if fp32_only else ("fp32", "bf16", "mixed"))
    options.candidates = options.candidates or (("few",) if options.goals else ("few", "many"))
    chosen = {
        name: getattr(options, name)
        for name in ("only", "goals", "precisions", "candidates", "lengths", "peer", "repeats", "tiny")
    }
    report: dict[str, Any] = {"machine": machine(options.threads), "options": chosen, "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(header(), flush=True)
    for row in run(options):
        print(line(row), flush=True)
        report["rows"].append(row.as_dict())
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")  # a run that is stopped leaves it too
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
