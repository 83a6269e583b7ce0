"""Does the quickstart learn? Paired gain of the task reward on held-out items, several seeds, and a control.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--config configs/quickstart.yaml] [--no-control]

Each row trains with `configs/quickstart.yaml` and scores 8 joint responses to each of the 12 evaluation items before
and after training with the same random numbers. In the control, winner and loser of a random half of each batch's pairs
are swapped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pbrl_lightning import MADPOModule, PairBatch
from pbrl_lightning.cli import PreferenceCLI
from pbrl_lightning.modules.base import Metrics
from pbrl_lightning.randomness import counted_generator

RESPONSES_PER_ITEM = 8


class SwappedMADPO(MADPOModule):
    """MADPO with winner and loser of a random half of each batch swapped: what it learns is not the reward.

    A half, not a coin for each pair: AdamW is blind to a gradient's size, and would follow the luck of the coin.
    """

    def step(self, batch: PairBatch, where: str) -> tuple[Tensor, Metrics]:
        """One step on swapped pairs."""
        generator = counted_generator(self.trainer.datamodule.seed, "selection", self.global_step, agent=1)
        swapped = torch.randperm(len(batch), generator=generator) < len(batch) // 2
        index = torch.arange(len(batch))
        rows = torch.cat([index + swapped * len(batch), index + ~swapped * len(batch)])
        agents = [
            replace(
                agent,
                input_ids=agent.input_ids[rows],
                attention_mask=agent.attention_mask[rows],
                response_mask=agent.response_mask[rows],
            )
            for agent in batch.agents
        ]
        return super().step(PairBatch(agents, batch.weights, batch.loss_scale, batch.candidate_reward_means), where)


def train(config: str, seed: int, control: bool, overrides: list[str]) -> dict[str, float | int | str]:
    """One training run; mean rewards before and after, the paired gain and its standard error over responses."""
    if control:
        text = Path(config).read_text(encoding="utf-8").replace("MADPOModule", f"{__name__}.SwappedMADPO")
        config = tempfile.mkstemp(suffix=".yaml", text=True)[1]
        Path(config).write_text(text, encoding="utf-8")
    arguments = ["--config", config, f"--data.seed={seed}", "--trainer.logger=false"]
    arguments += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    arguments += [f"--trainer.default_root_dir=runs/quickstart_seeds/{time.time_ns()}"]
    cli = PreferenceCLI([*arguments, *overrides], run=False)
    evaluator, team = cli.datamodule.evaluator, cli.model.team
    indices = list(range(len(evaluator.items)))
    before = evaluator.evaluate(team, indices, RESPONSES_PER_ITEM).rewards
    started = time.monotonic()
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.monotonic() - started
    after = evaluator.evaluate(team, indices, RESPONSES_PER_ITEM).rewards
    gain = after - before
    return {
        "run": "control" if control else "quickstart",
        "seed": seed,
        "before": before.mean().item(),
        "after": after.mean().item(),
        "gain": gain.mean().item(),
        "standard_error": (gain.std() / len(gain) ** 0.5).item(),
        "seconds": seconds,
    }


def main() -> None:
    """Prints one row per run, then writes all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--only-control", action="store_true")
    parser.add_argument("--json", default="runs/quickstart_seeds.json")
    options, overrides = parser.parse_known_args()
    rows = []
    print("| run | seed | before | after | paired gain | standard error | gain / error | training |")
    print("|---|---|---|---|---|---|---|---|")
    for control in [False] * (not options.only_control) + [True] * (not options.no_control):
        for seed in options.seeds:
            row = train(options.config, seed, control, overrides)
            rows.append(row)
            print(
                f"| {row['run']} | {seed} | {row['before']:.3f} | {row['after']:.3f} | {row['gain']:+.3f} | "
                f"{row['standard_error']:.3f} | {row['gain'] / row['standard_error']:+.1f} | {row['seconds']:.0f} s |",
                flush=True,
            )
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
