"""One run of a row, measured."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from pbrl_lightning.cli import PreferenceCLI

from .curve import RewardCurve
from .rows import API_URL, Row
from .server import serving

ROOT = Path(__file__).resolve().parent.parent.parent
Result = dict[str, Any]


def digest_of(row: Row) -> str:
    """Changes with all that decides a row's numbers, but the code."""
    config = yaml.safe_load((ROOT / row.config).read_text(encoding="utf-8"))
    text = json.dumps([config, row.options, row.responses], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def hardware() -> str:
    """The machine in neutral words."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    version = torch.__version__.partition("+")[0]
    return f"{os.cpu_count()} cores ({platform.machine()}), {gigabytes:.0f} GiB, torch {version}, one thread"


def run(row: Row, seed: int, cache: Path, overrides: tuple[str, ...] = ()) -> Result:
    """Trains as the row's command does, and evaluates besides.

    Args:
        row: What to run.
        seed: The run's.
        cache: Where the untrained rewards of a large model are kept.
        overrides: Further options; what they give is nothing for the page.
    """
    torch.set_num_threads(1)
    digest = digest_of(row)  # before: a configuration may be edited meanwhile
    with (
        tempfile.TemporaryDirectory(prefix="pbrl_results_") as directory,
        serving() if row.uses_server else (nullcontext(API_URL)) as url,
    ):
        arguments = [*row.arguments(seed), f"--trainer.default_root_dir={directory}", "--trainer.logger=false"]
        arguments += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
        arguments += ["--trainer.enable_model_summary=false", *overrides]
        if row.uses_server:
            arguments.append(f"--data.comparator.init_args.endpoint.url={url}")
        cli = PreferenceCLI(arguments, run=False)
        kept = cache / f"untrained_{_untrained_digest(row, seed)}.json"
        curve = RewardCurve(row.responses, _read(kept) if row.table == "writing" else None)
        cli.trainer.callbacks.append(curve)
        cli.trainer.fit(cli.model, cli.datamodule)
    if row.table == "writing" and not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(curve.before.tolist()), encoding="utf-8")
    gain = curve.after - curve.before
    return {
        "name": row.name,
        "seed": seed,
        "digest": digest,
        "before": round(curve.before.mean().item(), 4),
        "after": round(curve.after.mean().item(), 4),
        "gain": round(gain.mean().item(), 4),
        "error": round((gain.std() / len(gain) ** 0.5).item(), 4),
        "samples": curve.points[-1][0],
        "seconds": round(curve.seconds, 1),
        "curve": [[samples, round(reward, 4)] for samples, reward in curve.points],
        "hardware": hardware(),
    }


def _untrained_digest(row: Row, seed: int) -> str:
    """The same for rows whose untrained teams are asked the same."""
    config = yaml.safe_load((ROOT / row.config).read_text(encoding="utf-8"))
    data = {name: config["data"].get(name) for name in ("eval_items", "reward_func", "sampling")}
    text = json.dumps([config["model"]["init_args"]["team"], data, seed, row.responses], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(path: Path) -> Tensor | None:
    return torch.tensor(json.loads(path.read_text()), dtype=torch.float64) if path.exists() else None
