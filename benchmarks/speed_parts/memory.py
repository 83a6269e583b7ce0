"""Memory of teams: bytes that stay between steps, and the most that a process has held."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pbrl_lightning import MADPOModule
from pbrl_lightning.heap import keep_freed_memory
from speed_parts.bench import Bench
from speed_parts.learning import pair_batch
from speed_parts.peer import Peer
from speed_parts.rows import Row, Rows
from speed_parts.shared import peak_rss
from speed_parts.workload import Workload, pair_records

MEGABYTE = 1e6


def memory(bench: Bench, peer_of: Callable[[], Peer] | None) -> Rows:
    """Full and LoRA teams, each in a process of its own; then the peak of full MADPO beside the peer's.

    A team that the free memory does not hold is left out with a note.

    Args:
        bench: As for the other rows.
        peer_of: Starts a fresh peer, whose peak is its own.
    """
    work = bench.work
    fresh = multiprocessing.get_context("forkserver")  # imports once, forks a clean child for each team
    fresh.set_forkserver_preload(["pbrl_lightning"])
    frozen = _bytes_of_model(work)
    for lora in (False, True):
        for count in work.team_sizes:
            name = f"memory {'LoRA' if lora else 'full'} N={count}"
            needed = frozen * (4 * count if not lora else 2) + 2e9
            if needed > _free():
                print(f"{name} is left out: it needs {needed / 1e9:.0f} GB, {_free() / 1e9:.0f} GB are free")
                continue
            found = _in_child(fresh, work, count, lora, bench.lengths[0], 1)
            yield Row(
                name,
                found["bytes"] / MEGABYTE,
                "MB kept",
                note=f"{found['bytes'] / frozen:.2f} × one model's weights; peak RSS {found['peak'] / MEGABYTE:.0f} MB",
                extra={**found, "times_one_model": found["bytes"] / frozen},
            )
    for length in bench.lengths:
        found = _in_child(fresh, work, 2, False, length, work.batch_size)
        row = Row(f"peak memory MADPO {length} fp32", found["peak"] / MEGABYTE, "MB peak", extra=found)
        if peer_of is not None:
            team = work.team(num_agents=2)
            pairs = pair_records(work.pairs(team, length))
            del team
            with peer_of() as peer:
                for _ in range(2):
                    answer = peer.ask("madpo", pairs=pairs)
            row.peer = answer["peak_rss"] / MEGABYTE
            row.ratio = row.peer / row.value
        yield row


def _free() -> float:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024.0
    raise RuntimeError("/proc/meminfo has no MemAvailable: free memory is known on Linux only")


def _bytes_of_model(work: Workload) -> int:
    team = work.team(num_agents=1)
    return _bytes(team.parameters())


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _in_child(context: Any, *arguments: Any) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_train_twice, args=(sender, torch.get_num_threads(), *arguments))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        child.join()
        raise RuntimeError(f"the measured process ended with {child.exitcode} (-9: out of memory)") from error
    finally:
        child.join()


def _train_twice(
    sender: Any, threads: int, work: Workload, num_agents: int, lora: bool, length: str, num_pairs: int
) -> None:
    """Two updates; sends the bytes of parameters, gradients and optimizer state, and the peak of this process."""
    torch.set_num_threads(threads)
    keep_freed_memory()  # as every fit on a CPU does
    team = work.team(num_agents=num_agents, lora=lora)
    module = MADPOModule(team)
    batch = pair_batch(module, work.pairs(team, length)[:num_pairs])
    optimizer = module.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        module.step(batch, "the benchmark's batch")[0].backward()
        optimizer.step()
    parameters = list(module.parameters())
    parts = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": _bytes(_state_tensors(optimizer)),
    }
    sender.send({**parts, "bytes": sum(parts.values()), "peak": peak_rss()})


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
