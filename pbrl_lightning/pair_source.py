"""Where a run's preference pairs come from: collected and replayed round by round, or read from files."""

from __future__ import annotations

import re
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PreferencePair, TaskItem
from pbrl_lightning.distributed import from_rank_zero, together
from pbrl_lightning.preferences.collector import Collection, Collector
from pbrl_lightning.preferences.fingerprint import fingerprint, team_digest
from pbrl_lightning.preferences.journal import CollectionJournal
from pbrl_lightning.preferences.replay import CurrentReplay, ReplayBuffer
from pbrl_lightning.preferences.round_files import RoundStore, owned_by
from pbrl_lightning.preferences.round_mirror import mirror_round, restore_rounds
from pbrl_lightning.randomness import counted_generator, counted_permutation
from pbrl_lightning.rounds import RoundRecord, collection_details, notify
from pbrl_lightning.run_directory import run_directory
from pbrl_lightning.sharding import gathered
from pbrl_lightning.utils.errors import RunError

_JOURNAL_NAME = re.compile(r"round_\d{4,}-[0-9a-f]{32}")


class PairSource:
    """Collects a round's pairs, writes its file, and lets replay choose what the round trains on.

    Args:
        replay: Which stored pairs a round trains on.
        replay_dir: Where round files go; None for ``replay`` in the run's directory.

    Attributes:
        records: What happened, one per round.
        history_dir: Where the policy checkpoints of a HistoryComparator lie.
    """

    def __init__(self, replay: ReplayBuffer, replay_dir: str | None) -> None:
        self.replay = replay
        self.records: list[RoundRecord] = []
        self.history_dir: Path | None = None
        self._replay_dir = Path(replay_dir) if replay_dir is not None else None
        self._store: RoundStore | None = None
        self._journals: list[CollectionJournal] = []
        self._stale_journals: list[str] = []
        self._restored_store: dict[str, Any] | None = None
        self._restored_dir: str | None = None

    def collect(self, trainer: L.Trainer, collector: Collector, items: list[TaskItem], round_number: int) -> Collection:
        """Collects a round, the items shared out over processes, and stores its pairs.

        Args:
            trainer: The run's.
            collector: How.
            items: All task items.
            round_number: 1-based.

        Returns:
            The same on every process.
        """
        # A foreign directory is found before anything is sampled.
        self.open(trainer)
        started = time.monotonic()
        with gathered(trainer.lightning_module):
            collected = self._gather(trainer, collector, items, round_number)
        seconds = time.monotonic() - started
        store = self.open(trainer)
        if trainer.is_global_zero:
            entry = store.write(round_number, collected.pairs)
            for directory in {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}:
                if directory is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                    mirror_round(store.directory, entry, Path(directory))
        if trainer.world_size > 1:
            store.load_state_dict(from_rank_zero(store.state_dict()))
        record = RoundRecord(
            round=round_number,
            collected_pairs=len(collected.pairs),
            train_pairs=0,
            reward_mean=fmean(collected.actor_rewards) if collected.actor_rewards else None,
            comparator_reward_mean=fmean(collected.comparator_rewards) if collected.comparator_rewards else None,
            first_step=trainer.global_step,
            seconds=seconds,
            tokens_per_second=collected.num_tokens / max(seconds, 1e-9),
            details=collection_details(collected),
        )
        # A collection that was stopped before its round had begun is not counted twice.
        self.records = [known for known in self.records if known.round < round_number] + [record]
        notify(trainer, "on_round_scored", round_number, collected, collector.reward_range())
        return collected

    def _gather(self, trainer: L.Trainer, collector: Collector, items: list[TaskItem], round_number: int) -> Collection:
        count = min(len(items), 2) if trainer.fast_dev_run else len(items)  # type: ignore[attr-defined]
        own = list(range(trainer.global_rank, count, trainer.world_size))
        total, done = collector.sampling_passes() * len(own), 0

        def progress(passed: int) -> None:
            nonlocal done
            done += passed
            notify(trainer, "on_collection_progress", done, total)

        progress(0)
        team: AgentTeam = trainer.lightning_module.team  # type: ignore[assignment]
        journal = self._journal(trainer, collector, items, round_number)

        def collect() -> dict[int, Collection]:
            own_items = [items[index] for index in own]
            options = {"history": self.history_dir, "progress": progress, "journal": journal}
            return dict(zip(own, collector.collect(team, own_items, own, round_number, **options), strict=True))  # type: ignore[arg-type]

        collected = Collection()
        for part in together(collect):
            collected.extend(part)
        journal.close()
        notify(trainer, "on_collection_end", round_number)
        remote = collector.comparator is not None and collector.comparator.is_remote
        if remote and count and not collected.num_comparator_responses:
            raise RunError(f"the comparator gave no joint response to any task item of round {round_number}")
        return collected

    def _journal(
        self, trainer: L.Trainer, collector: Collector, items: list[TaskItem], round_number: int
    ) -> CollectionJournal:
        """Found by what decides the collection, so that a run that is started again in its first round finds it too."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return CollectionJournal(None)
        team: AgentTeam = trainer.lightning_module.team  # type: ignore[assignment]
        comparator = collector.comparator.identity() if collector.comparator is not None else None
        name = fingerprint(
            [round_number, items, collector.seed, collector.num_candidates, collector.sampling, comparator],
            [team_digest(team), team.formatters, team.max_prompt_length],
        )
        directory = Path(trainer.default_root_dir) / "journal" / f"round_{round_number:04d}-{from_rank_zero(name)}"
        journal = CollectionJournal(directory, trainer.global_rank)
        if len(journal) and trainer.is_global_zero:
            rank_zero_info(f"round {round_number} goes on from the journal of an earlier start, {directory}")
        self._journals.append(journal)
        return journal

    def drop_stale_journals(self, trainer: L.Trainer) -> None:
        """Removes journals that the checkpoint a run goes on from has made needless."""
        for name in self._stale_journals:
            CollectionJournal(Path(trainer.default_root_dir) / "journal" / name).remove()
        self._stale_journals.clear()

    def drop_journals(self) -> None:
        """Removes the journals of rounds whose pairs are safe: in a checkpoint, or in a run that is over."""
        for journal in self._journals:
            journal.remove()
        self._journals.clear()

    def select(
        self, seed: int, round_number: int, collected: list[PreferencePair], iterative: bool
    ) -> list[PreferencePair]:
        """The pairs that replay chooses for a round."""
        if isinstance(self.replay, CurrentReplay) and not iterative:
            return collected  # with the token ids as sampled, which round files do not hold
        assert self._store is not None  # `collect` comes first
        counts = [(entry.iteration, entry.num_pairs) for entry in self._store.entries]
        return self._store.fetch(
            self.replay.select(counts, round_number, counted_generator(seed, "replay", round_number))
        )

    def open(self, trainer: L.Trainer) -> RoundStore:
        """The run's round files; claims or restores their directory the first time."""
        # Not in `setup`: whether the run is a resumed one (Lightning sets `ckpt_path` later) and which directory is its
        # own are not known there.
        if self._store is None:
            restored = self._restored_store
            store = RoundStore(directory := self._directory(trainer))
            run_id = restored["run_id"] if restored is not None else from_rank_zero(uuid.uuid4().hex)
            if restored is not None:
                store.load_state_dict(restored)
            if trainer.is_global_zero:
                store.open(run_id)
                if restored is not None and trainer.ckpt_path is not None:
                    restore_rounds(directory, store.entries, Path(trainer.ckpt_path).parent)
            self._store = store
        return self._store

    def _directory(self, trainer: L.Trainer) -> Path:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._scratch = tempfile.TemporaryDirectory(prefix="pbrl_")  # a trial claims no directory
            return Path(from_rank_zero(self._scratch.name))
        restored, directory = self._restored_store, Path(self._restored_dir or "")
        # A checkpoint may come from elsewhere: what it names is written to only if it is this run's own.
        if self._replay_dir is None and restored is not None and owned_by(directory, restored["run_id"]):
            return directory
        return self._replay_dir or run_directory(trainer) / "replay"

    @property
    def directory(self) -> Path | None:
        """Where the round files are; None before there are any."""
        return self._store.directory if self._store is not None else None

    def state_dict(self) -> dict[str, Any]:
        """Records, and the index of the round files."""
        return {
            "rounds": [asdict(record) for record in self.records],
            # A run resumed inside a round opens its store at the next one only.
            "store": self._store.state_dict() if self._store is not None else self._restored_store,
            # Removed right after this checkpoint is written, or by a run that goes on from it.
            "journals": [journal.directory.name for journal in self._journals if journal.directory is not None],
            "replay_dir": str(self._store.directory) if self._store is not None else self._restored_dir,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.records = [RoundRecord(**record) for record in state["rounds"]]
        self._restored_store, self._restored_dir = state["store"], state["replay_dir"]
        self._stale_journals = [name for name in state["journals"] if _JOURNAL_NAME.fullmatch(name)]


def warn_of_shared_items(training: list[PreferencePair], held_out: list[PreferencePair]) -> None:
    """Warns if held-out pairs are of task items that are trained on."""
    trained = {tuple(pair.prompts) for pair in training}
    shared = sum(any(pair.prompts) and tuple(pair.prompts) in trained for pair in held_out)
    if shared:
        rank_zero_warn(
            f"{shared} of the {len(held_out)} `eval_pairs` have the prompts of pairs that are trained on, so their "
            "loss and accuracy do not show how well pairs of other task items are ordered"
        )


def held_out_split(
    pairs: list[PreferencePair], fraction: float, seed: int
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Splits pairs by task item: all pairs of the same prompts lie on one side.

    Args:
        pairs: All pairs.
        fraction: Share of the items held out, in [0, 1); at least one item if there are two and it is above 0.
        seed: The run's seed.

    Returns:
        Training pairs and held-out pairs, in the given order.
    """
    items = list(dict.fromkeys(tuple(pair.prompts) for pair in pairs))
    count = min(len(items) - 1, max(1, round(fraction * len(items)))) if fraction > 0 else 0
    order = counted_permutation(len(items), counted_generator(seed, "order", item=2))
    held = {items[index] for index in order[:count]}
    return [p for p in pairs if tuple(p.prompts) not in held], [p for p in pairs if tuple(p.prompts) in held]
