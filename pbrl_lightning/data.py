"""PreferenceDataModule: collection and replay at the epoch boundary."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import EvaluationBatch, PairTokens, PreferencePair
from pbrl_lightning.comparators.base import Comparator
from pbrl_lightning.data_items import load_items
from pbrl_lightning.data_options import validate_options
from pbrl_lightning.distributed import from_rank_zero, gather_by_index
from pbrl_lightning.evaluation import EvaluationLoader, Evaluator
from pbrl_lightning.preferences.collector import Collection, Collector
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.preferences.pair_tokens import PairLoader, pairs_from_state, pairs_to_state, trainable_pairs
from pbrl_lightning.preferences.replay import CurrentReplay, ReplayBuffer
from pbrl_lightning.preferences.round_files import RoundStore, read_pairs
from pbrl_lightning.preferences.round_mirror import mirror_round, restore_rounds
from pbrl_lightning.preferences.selection import PairSelection
from pbrl_lightning.randomness import counted_generator
from pbrl_lightning.rounds import RoundRecord, RunProgress, completed_epochs, log_to, notify
from pbrl_lightning.schedule import Position, RoundSchedule


class PreferenceDataModule(L.LightningDataModule):
    """Task items and a reward in, batches of preference pairs out.

    At the first epoch of each round it samples joint responses of the module's team, scores them, writes the pairs
    to a round file and lets replay choose the training pairs. The run is iterative if a comparator is given.

    Args:
        items: Task items: a list of dicts, a JSON or JSONL file, or a callable (also by import path).
        reward_func: Scores joint responses: ``reward_func(*completions, prompts=…, batch_items=…)`` returns one number
            per joint response; ``completions`` are ``N`` lists of ``B`` texts. Also an import path, or async.
        reward_processor: Applied to each score (scale, shift, clip …) before it orders pairs.
        eval_items: Held-out task items; without them there is no evaluation.
        eval_metrics: The user's own metrics, called like the reward; returns a dict of numbers.
        comparator: Who gives the other side of each comparison; makes the run iterative.
        replay: Which stored pairs a round trains on.
        num_candidates: Joint responses per item; default 80, iterative 20.
        pairs_per_sample: Most pairs kept per item, null for all; default 16, iterative 4.
        pair_selection: ``reward_gap``, ``random``, ``all`` or (iterative) ``comparator_reward``; default the first,
            iterative the last.
        sampling: How responses are sampled.
        batch_size: Pairs per batch and process.
        pairs: Round files to train on instead of collecting.
        replay_dir: Where round files go; default ``replay`` in the run's log directory.
        seed: The run's seed: every draw is a function of it.
        max_concurrency: Most calls of an async reward at once.
        num_turns: Only 1 is supported.
        joint_mode: Only ``aligned`` is supported.

    Raises:
        ValueError: If options do not fit together; all problems are named at once.
    """

    def __init__(
        self,
        items: Any = None,
        reward_func: Callable[..., Any] | str | None = None,
        *,
        reward_processor: Callable[[float], float] | str | None = None,
        eval_items: Any = None,
        eval_metrics: Callable[..., dict[str, float]] | None = None,
        comparator: Comparator | None = None,
        replay: ReplayBuffer | None = None,
        num_candidates: int | None = None,
        pairs_per_sample: int | Literal["default"] | None = "default",
        pair_selection: PairSelection | None = None,
        sampling: SamplingConfig | None = None,
        batch_size: int = 2,
        pairs: list[str] | None = None,
        replay_dir: str | None = None,
        seed: int = 0,
        max_concurrency: int = 8,
        num_turns: int = 1,
        joint_mode: str = "aligned",
    ) -> None:
        super().__init__()
        self.comparator = comparator
        self.replay = replay or CurrentReplay()
        self.num_candidates = num_candidates or (80 if comparator is None else 20)
        self.pair_selection: PairSelection = pair_selection or (
            "reward_gap" if comparator is None else "comparator_reward"
        )
        if pairs_per_sample == "default":
            pairs_per_sample = None if self.pair_selection == "all" else 16 if comparator is None else 4
        self.pairs_per_sample = pairs_per_sample
        self.sampling = sampling or SamplingConfig()
        self.batch_size = batch_size
        self.pair_paths = pairs
        self.seed = seed
        validate_options(
            self,
            items=items,
            reward_func=reward_func,
            eval_items=eval_items,
            replay=replay,
            num_candidates=num_candidates,
            num_turns=num_turns,
            joint_mode=joint_mode,
        )
        self.items = load_items(items, "items") if items is not None else []
        self.oracle = None
        if reward_func is not None:
            self.oracle = Oracle(reward_func, reward_processor, max_concurrency=max_concurrency)
        self.evaluator: Evaluator | None = None
        if eval_items is not None and reward_func is not None:
            # An oracle of its own: what evaluation drops is not counted as dropped candidates.
            oracle = Oracle(reward_func, reward_processor, max_concurrency=max_concurrency)
            held_out = load_items(eval_items, "eval_items")
            self.evaluator = Evaluator(held_out, oracle, self.sampling, seed, eval_metrics)
        self._replay_dir = Path(replay_dir) if replay_dir is not None else None
        self._file_pairs: list[PreferencePair] = []
        self._limit_val_batches: int | float | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        """The state of a run before its first round; a resumed run's is loaded over it."""
        self.history_dir: Path | None = None
        self.rounds: list[RoundRecord] = []
        self._store: RoundStore | None = None
        self._restored_store: dict[str, Any] | None = None
        self._restored_dir: str | None = None
        self._progress = RunProgress()
        self._pairs: list[PreferencePair] = []
        self._tokens: list[PairTokens] | None = None

    @property
    def iterative(self) -> bool:
        """True if the run compares against a comparator, round after round."""
        return self.comparator is not None

    @property
    def current_round(self) -> int:
        """The round in progress, 1-based; 0 before the first."""
        return self._progress.round

    @property
    def env_step(self) -> int:
        """Joint responses sampled for training so far, both sides."""
        return self._progress.env_step

    @override
    def setup(self, stage: str) -> None:
        trainer = self._trainer
        if stage != "fit":
            return
        self._start_afresh()
        if not self.items and self.pair_paths is None:
            raise ValueError("`items` (with `reward_func`) or `pairs` must be given to fit")
        if self.evaluator is None:
            rank_zero_warn("no `eval_items` are given, so this run is not evaluated (never on the training items)")
        if self.comparator is not None:
            self.comparator.check(self._team.num_agents)
        if self.pair_paths is not None:
            self._file_pairs = read_pairs(self.pair_paths)
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        # Evaluation is the JointEvaluation callback's; `teardown` lets this trainer validate again.
        self._limit_val_batches, trainer.limit_val_batches = trainer.limit_val_batches, 0
        schedule = self._schedule
        limit = trainer.fit_loop.max_epochs
        if limit is None or limit < 0 or limit > schedule.total_epochs:
            trainer.fit_loop.max_epochs = schedule.total_epochs

    @override
    def teardown(self, stage: str) -> None:
        if stage == "fit" and self._limit_val_batches is not None:
            self._trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    @override
    def train_dataloader(self) -> PairLoader:
        trainer = self._trainer
        epoch = completed_epochs(trainer)
        position = self._prepare_round(epoch)
        if self._tokens is None:  # resumed inside a round
            self._pairs, self._tokens = trainable_pairs(self._team, self._pairs)
        return PairLoader(
            self._team,
            self._pairs if position is not None else [],
            self._tokens if position is not None else [],
            self.batch_size,
            self.seed,
            self._progress.round,
            position.epoch if position is not None else 0,
            trainer.accumulate_grad_batches,
            trainer.global_rank,
            trainer.world_size,
        )

    @override
    def val_dataloader(self) -> EvaluationLoader | list[Any]:
        if self._trainer.state.fn == "fit":
            return []
        if self.evaluator is None:
            raise ValueError("`eval_items` and `reward_func` must be given to validate")
        return EvaluationLoader(self.evaluator, self._team, self.batch_size)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": asdict(self._progress),
            "rounds": [asdict(record) for record in self.rounds],
            # A run resumed inside a round opens its store at the next one only.
            "store": self._store.state_dict() if self._store is not None else self._restored_store,
            "replay_dir": str(self._store.directory) if self._store is not None else self._restored_dir,
            "pairs": pairs_to_state(self._pairs),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._progress = RunProgress(**state_dict["progress"])
        self.rounds = [RoundRecord(**record) for record in state_dict["rounds"]]
        self._pairs, self._tokens = pairs_from_state(state_dict["pairs"]), None
        self._restored_store, self._restored_dir = state_dict["store"], state_dict["replay_dir"]

    def evaluate(self, num_samples: int) -> EvaluationBatch | None:
        """One joint response of the current agents to each of the first evaluation items; None without any."""
        if self.evaluator is None:
            return None
        return self.evaluator.evaluate(self._team, list(range(min(num_samples, len(self.evaluator.items)))))

    def finish(self) -> None:
        """Ends the last round, if all of its epochs are over."""
        if not self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # Lightning counts an epoch that `max_steps` or a stop cut short as over
        shift = self._progress.skipped_rounds * self._schedule.epochs_per_round
        position = self._schedule.locate(completed_epochs(self._trainer) + shift)
        if position is None or position.round != self._progress.round:
            self._end_round()

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("the PreferenceDataModule is not attached to a Trainer; use Trainer.fit(module, data)")
        return self.trainer

    @property
    def _team(self) -> AgentTeam:
        return self._trainer.lightning_module.team  # type: ignore[return-value]

    @property
    def _schedule(self) -> RoundSchedule:
        return self._trainer.lightning_module.make_schedule(self.iterative)  # type: ignore[operator]

    def _prepare_round(self, epoch: int) -> Position | None:
        """Brings the state to the round of this epoch; passes over rounds that have nothing to train on."""
        schedule, progress = self._schedule, self._progress
        while True:
            shift = progress.skipped_rounds * schedule.epochs_per_round
            limit = schedule.total_epochs - shift  # also after a resume, which sets the schedule's
            users = self._trainer.fit_loop.max_epochs
            self._trainer.fit_loop.max_epochs = limit if users is None else min(users, limit)
            position = schedule.locate(epoch + shift)
            if position is not None and position.round == progress.round:
                return position
            self._end_round()
            if position is None:
                self._trainer.fit_loop.max_epochs = epoch
                if not epoch:
                    rank_zero_warn("no task item gave a preference pair (all ties?); the run ends without an update")
                return None
            progress.round = position.round
            self._pairs, self._tokens = self._begin_round(position.round)
            if self._pairs:
                return position
            rank_zero_info(f"round {position.round} has no pairs to train on and passes without an update")
            progress.skipped_rounds += 1

    def _begin_round(self, round_number: int) -> tuple[list[PreferencePair], list[PairTokens]]:
        """Collects a round, writes its file, and lets replay choose; returns the training pairs and their tokens."""
        trainer = self._trainer
        if self.pair_paths is None:
            # A foreign directory is found before anything is sampled. Not in `setup`: whether the run is a resumed one
            # (Lightning sets `ckpt_path` later) and which directory is its own are not known there.
            self._open_store()
        notify(trainer, "on_round_start", round_number)
        if self.pair_paths is not None:
            return trainable_pairs(self._team, self._file_pairs)
        started = time.monotonic()
        collected = self._collect(round_number)
        seconds = time.monotonic() - started
        store = self._open_store()
        if trainer.is_global_zero:
            entry = store.write(round_number, collected.pairs)
            for directory in {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}:
                if directory is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                    mirror_round(store.directory, entry, Path(directory))
        if trainer.world_size > 1:
            store.load_state_dict(from_rank_zero(store.state_dict()))
        self._progress.env_step += collected.num_responses
        self._progress.total_pairs += len(collected.pairs)
        pairs, tokens = trainable_pairs(self._team, self._select(round_number, collected.pairs))
        record = RoundRecord(
            round=round_number,
            collected_pairs=len(collected.pairs),
            train_pairs=len(pairs),
            reward_mean=fmean(collected.actor_rewards) if collected.actor_rewards else None,
            comparator_reward_mean=fmean(collected.comparator_rewards) if collected.comparator_rewards else None,
            first_step=trainer.global_step,
            seconds=seconds,
            tokens_per_second=collected.num_tokens / max(seconds, 1e-9),
        )
        self.rounds.append(record)
        self._log(record)
        notify(trainer, "on_round_collected", record)
        return pairs, tokens

    def _select(self, round_number: int, collected: list[PreferencePair]) -> list[PreferencePair]:
        store = self._open_store()
        counts = [(entry.iteration, entry.num_pairs) for entry in store.entries]
        chosen = self.replay.select(counts, round_number, counted_generator(self.seed, "replay", round_number))
        if isinstance(self.replay, CurrentReplay) and not self.iterative:
            return collected  # with the token ids as sampled, which round files do not hold
        return store.fetch(chosen)

    def _collect(self, round_number: int) -> Collection:
        trainer = self._trainer
        assert self.oracle is not None  # validate_options
        collector = Collector(
            self.oracle,
            self.sampling,
            self.num_candidates,
            self.pair_selection,
            self.pairs_per_sample,
            self.seed,
            self.comparator,
        )
        count = min(len(self.items), 2) if trainer.fast_dev_run else len(self.items)  # type: ignore[attr-defined]
        own = list(range(trainer.global_rank, count, trainer.world_size))
        total, done = collector.sampling_passes() * len(own), 0

        def progress(items: int) -> None:
            nonlocal done
            done += items
            notify(trainer, "on_collection_progress", done, total)

        items = [self.items[index] for index in own]
        parts = collector.collect(self._team, items, own, round_number, history=self.history_dir, progress=progress)
        collected = Collection()
        for part in gather_by_index(dict(zip(own, parts, strict=True))):
            collected.extend(part)
        return collected

    def _end_round(self) -> None:
        if self._progress.ended_round < self._progress.round:
            self._progress.ended_round = self._progress.round
            notify(self._trainer, "on_round_end", self._progress.round)

    def _open_store(self) -> RoundStore:
        if self._store is None:
            restored = self._restored_store
            store = RoundStore(directory := self._store_directory())
            run_id = restored["run_id"] if restored is not None else from_rank_zero(uuid.uuid4().hex)
            if restored is not None:
                store.load_state_dict(restored)
            if self._trainer.is_global_zero:
                store.open(run_id)
                if restored is not None and self._trainer.ckpt_path is not None:
                    restore_rounds(directory, store.entries, Path(self._trainer.ckpt_path).parent)
            self._store = store
        return self._store

    def _store_directory(self) -> Path:
        trainer = self._trainer
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._scratch = tempfile.TemporaryDirectory(prefix="pbrl_")  # a trial claims no directory
            return Path(self._scratch.name)
        if self._replay_dir is None and self._restored_dir is not None:
            return Path(self._restored_dir)
        return self._replay_dir or Path(trainer.log_dir or trainer.default_root_dir) / "replay"

    def _log(self, record: RoundRecord) -> None:
        metrics = record.metrics()
        metrics["iter/total_preference_pairs"] = self._progress.total_pairs
        metrics["env_step"] = self._progress.env_step
        metrics["collect/dropped_candidates"] = self.oracle.num_dropped if self.oracle is not None else 0
        for name in ("truncated_prompts", "truncated_responses", "identical_pairs"):
            metrics[f"collect/{name}"] = self._team.counts.get(name, 0)
        log_to(self._trainer, metrics)
