"""CoMLRL 1.4.3 at the same work. Run by an interpreter that has it, by ``peer.py``: requests in, seconds out.

Its trainers are used as they come: what they do in one collection, update, step or round, without their logging.

    python comlrl_peer.py MODEL_DIRECTORY THREADS < requests
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from comlrl.trainers.preference import madpo
from comlrl.trainers.preference.iterative import MADPOIterConfig, MADPOIterTrainer
from comlrl.trainers.preference.marlhf import MARLHFConfig, MARLHFTrainer
from comlrl.trainers.reinforce.magrpo import MAGRPOConfig, MAGRPOTrainer
from shared import FORMATTERS, TEMPERATURE, TOP_K, TOP_P, peak_rss, reward
from transformers.utils import logging as transformers_logging

DIRECTORY, THREADS = sys.argv[1], int(sys.argv[2])
KINDS = {
    "madpo": (madpo.MADPOTrainer, madpo.MADPOConfig),
    "policy": (MAGRPOTrainer, MAGRPOConfig),
    "round": (MADPOIterTrainer, MADPOIterConfig),
    "reward": (MARLHFTrainer, MARLHFConfig),
}


def formatter(template: str) -> Callable[..., str]:
    """A formatter in the form that the trainers take."""
    return lambda item, external_prompts=None: template.format(**item)  # noqa: ARG005


class Trainers:
    """The trainer in use; only one at a time is in memory."""

    def __init__(self) -> None:
        self._kind, self._trainer = "", None

    def get(self, kind: str, **options: Any) -> Any:
        """A trainer of this kind with these settings; the one from before if it is the same kind."""
        if kind != self._kind:
            self._trainer = None
            gc.collect()
            trainer, config = KINDS[kind]
            arguments = config(
                temperature=TEMPERATURE,
                top_p=TOP_P,
                top_k=TOP_K,
                num_train_epochs=1,
                num_turns=1,
                eval_interval=0,
                agent_devices="cpu",
                **({"reward_model_device": "cpu"} if kind == "reward" else {}),
            )
            self._trainer = trainer(
                agents=[DIRECTORY] * 2,
                num_agents=2,
                reward_func=reward,
                formatters=[formatter(template) for template in FORMATTERS],
                args=arguments,
            )
            self._trainer.verbose = False
            self._kind = kind
            if kind == "reward":
                self._trainer.model_name = DIRECTORY
                self._trainer._init_reward_model()
        for name, value in options.items():
            if not hasattr(self._trainer.args, name):
                raise AttributeError(f"CoMLRL has no option {name}")
            setattr(self._trainer.args, name, value)
        return self._trainer


def pairs_of(records: list[dict[str, Any]]) -> list[madpo.PreferencePair]:
    """Pairs in the peer's form, with the token ids given."""
    pairs = []
    for record in records:
        ids = zip(record["prompt_ids"], record["winner_ids"], record["loser_ids"], strict=True)
        tensors = [madpo.AgentPreferenceTensors(*map(torch.tensor, columns)) for columns in ids]
        texts = (record["prompts"], record["winner"], record["loser"])
        pairs.append(madpo.PreferencePair(*texts, tensors, 1.0, 0.0, 0.5))
    return pairs


def work_of(trainers: Trainers, request: dict[str, Any]) -> Callable[[], object]:
    """What a request asks for, ready to be timed."""
    what, items = request["what"], request.get("items")
    new_tokens = {"max_new_tokens": request["new_tokens"]} if "new_tokens" in request else {}
    if what == "collect":
        options = {"preference_num_candidates": request["candidates"], "preference_pairs_per_sample": 4}
        trainer = trainers.get("madpo", **options, **new_tokens)
        trainer.train_dataset = items
        return trainer._build_preference_dataset
    if what == "madpo":
        trainer, pairs = trainers.get("madpo"), pairs_of(request["pairs"])
        return lambda: trainer._update_from_preference_batch(pairs)
    if what == "reward":
        trainer, pairs = (
            trainers.get("reward", reward_train_batch_size=len(request["pairs"])),
            pairs_of(request["pairs"]),
        )
        return lambda: trainer._train_reward_model(pairs)
    if what == "policy":
        options = {"num_generations": request["generations"], "rollout_buffer_size": len(items)}
        trainer = trainers.get("policy", train_batch_size=len(items), **options, **new_tokens)
        trainer.train_dataset = items
        return trainer.train
    if what == "round":
        options = {"preference_num_candidates": request["candidates"], "train_batch_size": request["batch_size"]}
        trainer = trainers.get("round", num_iterations=1, **options, **new_tokens)
        trainer.train_dataset = items
        return trainer.train
    raise ValueError(f"unknown request {what!r}")


def check_lengths(pairs: Any, new_tokens: int) -> None:
    """Raises a ValueError if a response ended early: it would be less work than ours."""
    lengths = {len(tensors.winner_completion_ids) for pair in pairs for tensors in pair.agent_tensors}
    if lengths != {new_tokens}:
        raise ValueError(f"the peer's responses must have {new_tokens} tokens, got {sorted(lengths)}")


def main() -> None:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the trainers print is no answer
    torch.set_num_threads(THREADS)
    transformers_logging.disable_progress_bar()
    trainers = Trainers()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # round files
        for line in sys.stdin:
            request = json.loads(line)
            work = work_of(trainers, request)
            started = time.perf_counter()
            result = work()
            seconds = time.perf_counter() - started
            if request["what"] == "collect":
                check_lengths(result, request["new_tokens"])
            print(json.dumps({"seconds": seconds, "peak_rss": peak_rss()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
