"""The journal of a collection: whenever a run dies, nothing that was paid for is asked for again."""

import asyncio
import functools
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import training_runs as runs
from pbrl_lightning import AgentTeam, CurrentComparator, JointRewardModel, MARLHFModule, PreferenceJudge, SamplingConfig
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.fingerprint import fingerprint, team_digest
from pbrl_lightning.preferences.journal import CollectionJournal
from pbrl_lightning.preferences.oracle import Oracle, OracleError
from pbrl_lightning.rounds import RoundCallback

CALLS = 2 * len(runs.ITEMS)  # of a plain reward in an iterative round: both sides of each item
ENTRIES = {
    ("sample", "actors", 3): {"texts": ["ä\n\u2028 \ud800", ""], "ids": [[1, 2], []], "finished": True},
    ("score", "by", "actors", 3, 0): -0.1 / 3,
    ("score", "by", "actors", 3, 1): None,
    ("answer", 4, 1, 0): 'quotes " and \\ and ]]',
}


def strict_lines(directory):
    """Every whole line of the journals below a directory; none may be more than JSON allows."""
    whole = [path.read_bytes().rpartition(b"\n")[0] for path in sorted(Path(directory).rglob("rank_*.jsonl"))]
    return [json.loads(line, parse_constant=pytest.fail) for lines in whole for line in lines.splitlines()]


def only_file(directory):
    (path,) = Path(directory).glob("rank_*.jsonl")
    return path


def entries_in(directory, keys=ENTRIES):
    journal = CollectionJournal(directory, rank=5)
    return {key: journal[key] for key in keys if key in journal}


def test_entries_are_on_disk_when_add_returns_and_a_cut_file_keeps_its_whole_lines(tmp_path):
    journal, whole = CollectionJournal(tmp_path / "j"), list(ENTRIES.items())
    for number, entry in enumerate(whole, 1):
        journal.add([entry])
        assert entries_in(tmp_path / "j") == dict(whole[:number])  # what a process that is killed here leaves
    data = only_file(tmp_path / "j").read_bytes()
    for cut in range(len(data) + 1):
        (directory := tmp_path / f"cut_{cut}").mkdir()
        (directory / "rank_0.jsonl").write_bytes(data[:cut])
        journal = CollectionJournal(directory)
        known = {key: journal[key] for key in ENTRIES if key in journal}
        assert len(known) >= data[:cut].count(b"\n")
        assert known == dict(whole[: len(journal)])
        journal.write([(("new", 1), 5.0)])
        # What it built on must not be lost by what it wrote.
        again = CollectionJournal(directory)
        assert (entries_in(directory), again["new", 1]) == (known, 5.0), f"cut after {cut} of {len(data)} bytes"
        assert len(strict_lines(directory)) == len(known) + 1


@pytest.mark.parametrize("damaged", [b"", b"null", b"[1, 2]", b"[[[1]], 2]", b"[" * 10**5, b"\0\0", b'[["\xff"], 1]'])
def test_a_damaged_line_loses_only_itself(tmp_path, damaged):
    for place, lost in enumerate(ENTRIES):
        CollectionJournal(tmp_path / str(place)).add(ENTRIES.items())
        path = only_file(tmp_path / str(place))
        lines = path.read_bytes().split(b"\n")
        path.write_bytes(b"\n".join([*lines[:place], damaged, *lines[place + 1 :]]))
        assert entries_in(path.parent) == {key: value for key, value in ENTRIES.items() if key != lost}


def test_fault_B91_what_cannot_be_written_raises_and_loses_nothing_else(tmp_path, monkeypatch):
    journal = CollectionJournal(tmp_path)
    journal.add([(("a", 1), "x" * 5000)])
    for value in (math.nan, math.inf, -math.inf, object(), {1, 2}):
        with pytest.raises((TypeError, ValueError), match="JSON"):
            journal.add([(("a", 2), value)])
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        journal.add([(("a", 2), 2)])
    monkeypatch.undo()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the kernel takes the first bytes of a line and refuses the others
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        with pytest.raises(OSError, match="too large"):
            journal.add([(("a", 2), "y" * 20_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    assert ("a", 2) not in journal
    journal.add([(("a", 3), 3)])
    assert entries_in(tmp_path, [("a", 1), ("a", 3)]) == {("a", 1): "x" * 5000, ("a", 3): 3}


def test_every_process_has_a_file_of_its_own_and_removing_leaves_nothing(tmp_path):
    one, two = tmp_path / "journal" / "one", tmp_path / "journal" / "two"
    for rank, key in zip((0, 1, 11, 1), ENTRIES, strict=True):
        CollectionJournal(one, rank).add([(key, rank)])
    assert entries_in(one) == dict(zip(ENTRIES, (0, 1, 11, 1), strict=True))
    names = sorted(path.name.partition("-")[0] for path in one.iterdir())
    assert names == ["rank_0", "rank_1", "rank_1", "rank_11"]
    (second := CollectionJournal(two)).add(ENTRIES.items())
    CollectionJournal(one).remove()
    assert list(tmp_path.rglob("*.jsonl")) == [only_file(two)]
    for journal in (second, second, CollectionJournal(None)):
        journal.remove()
    assert list(tmp_path.iterdir()) == []
    # Two learning rates in one root directory collect the same first round.
    first, second = CollectionJournal(one), CollectionJournal(one)
    first.add([(("a", 1), 1)])
    first.remove()
    second.add([(("a", 2), 2)])
    assert entries_in(one, [("a", 2)]) == {("a", 2): 2}


PARTS = """
import datetime, functools, pathlib, threading, numpy as np, torch
from pbrl_lightning import ApiComparator, ApiEndpoint, SamplingConfig
from pbrl_lightning.agents.loading import tiny_model
from pbrl_lightning.preferences.fingerprint import fingerprint
WORDS = {f"w{n}" for n in range(50)}
class Reward:
    def __init__(self):
        self.words, self.lock, self.anything = WORDS, threading.Lock(), object()
    def score(self, *completions, scale=1.0):
        return [scale] * len(completions[0])

def fingerprints():
    reward, api = Reward(), ApiComparator(ApiEndpoint("http://localhost:1", headers={"a": "${TEAM}"}), num_candidates=3)
    return [fingerprint(part) for part in (
        reward, reward.score, functools.partial(reward.score, scale=2.0), Reward, fingerprints, SamplingConfig(), api,
        frozenset([(1, "a"), (2, "b"), "c"]), np.float32(0.1), np.int64(3), np.arange(9), b"b", 1j, pathlib.Path("a"),
        datetime.date(2026, 1, 2), torch.arange(5.0), tiny_model(0), {"a": [1, {"b": WORDS}], 2: 0},
    )]
"""


@pytest.mark.slow
def test_fingerprints_are_equal_in_every_process_until_the_source_changes(tmp_path, monkeypatch):
    (path := tmp_path / "fingerprint_parts.py").write_text(PARTS)
    command = [sys.executable, "-c", "import fingerprint_parts as p; print(*p.fingerprints())"]
    printed = subprocess.check_output(command, cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": "12"}, text=True)
    monkeypatch.syspath_prepend(tmp_path)
    import fingerprint_parts as module

    assert printed.split() == (mine := module.fingerprints())
    assert len(set(mine)) == len(mine) == 18
    path.write_text(PARTS.replace("[scale]", "[-scale]"))
    assert [one == other for one, other in zip(mine, module.fingerprints(), strict=True)] == [False] * 5 + [True] * 13


def scaled(scale):
    return lambda *completions: [scale * score for score in runs.text_reward(*completions)]


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.5), ([["a"], "b"], [["a", "b"]]), (np.float32(1), np.float32(2)), (torch.zeros(3), torch.eye(3)[2]),
     (np.zeros(2001), np.eye(1, 2001, 9)[0]), ({"a": [{"b": {"c": [[1]]}}]}, {"a": [{"b": {"c": [[2]]}}]}),
     (functools.partial(scaled, 1), functools.partial(scaled, 2)), (scaled(1), scaled(2)), (lambda: 0, lambda: 1)],
    ids=["float", "nesting", "numpy", "tensor", "array", "deep", "partial", "closure", "lambda"],
)  # fmt: skip
def test_what_differs_has_another_fingerprint(one, other):
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_team_after_one_small_step_is_another(lora):
    digests = [team_digest(team := runs.make_team(lora).load())]
    for agent in (0, 1):
        for parameter in team.agent_parameters(agent).values():
            parameter.grad = torch.full_like(parameter, 1e-3)
        torch.optim.AdamW(team.agent_parameters(agent).values(), lr=5e-6).step()
        digests.append(team_digest(team))
    assert len(set(digests)) == 3
    assert team_digest(runs.make_team(lora).load()) == digests[0]


@pytest.mark.parametrize("tie", ["itself", "list", "method", "partial", "builtin", "module", "many"])
def test_objects_that_refer_to_themselves_end(tie):
    knot, *_ = knots = [L.Callback() for _ in range(8)]
    held = {"itself": knot, "list": [knot], "method": knot.state_dict, "builtin": len, "module": json, "many": knots}
    for one in knots:
        one.held = held.get(tie, functools.partial(knot.state_dict))
    assert fingerprint(knot) == fingerprint(knot)


ODD = [None, math.nan, math.inf, np.float32(0.1), torch.tensor(2.5, requires_grad=True), np.array(0.7), True]


class Odd:
    """Scores of every kind, and none, by the texts alone."""

    def __init__(self, shift=0):
        self.shift, self._asked = shift, 0

    def __call__(self, *completions):
        self._asked += len(completions[0])
        rows = [zlib.crc32(repr(row).encode()) for row in zip(*completions, strict=True)]
        return [[*ODD, *map(float, range(7))][(row + self.shift) % 14] for row in rows]


class AsyncOdd(Odd):
    async def __call__(self, *completions):
        await asyncio.sleep(0)
        return super().__call__(*completions)


class OddJudge(PreferenceJudge):
    _asked = 0

    async def compare(self, first, second, *, prompts, item):
        self._asked += 1
        return [None, 0, 0.5, 0.75, 1][zlib.crc32(repr((first, second)).encode()) % 5]


@pytest.fixture(scope="module")
def team():
    return runs.perturb(runs.make_team(dtype="float64").load(), 1)


def collect(team, asker, iterative, directory=None):
    """What is collected, how many scores were dropped; how many items were sampled, how much was asked."""

    def sample(items, *arguments, **options):
        sampled.extend(items)
        return AgentTeam.sample(team, items, *arguments, **options)

    judge, oracle, sampled = (asker, None, []) if isinstance(asker, OddJudge) else (None, Oracle(asker), [])
    selection, comparator = ("comparator_reward", CurrentComparator()) if iterative else ("reward_gap", None)
    collector = Collector(oracle, runs.SAMPLING, 3, selection, None, 5, comparator, judge)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(team, "sample", sample)
        parts = collector.collect(team, runs.ITEMS, [4, 0, 7], 2, journal=CollectionJournal(directory))
    return (parts, oracle and oracle.num_dropped), (len(sampled), asker._asked)


@pytest.mark.parametrize("iterative", [False, True], ids=["base", "iterative"])
@pytest.mark.parametrize("asker", [Odd, AsyncOdd, OddJudge])
def test_fault_B93_any_part_of_a_journal_gives_the_same_and_asks_for_the_rest(tmp_path, team, asker, iterative):
    plain = collect(team, asker(), iterative)
    assert collect(team, asker(), iterative, tmp_path / "whole") == plain
    assert plain[1] == (6 if iterative else 3, 18 if iterative and asker is not OddJudge else 9)
    assert sum(plain[1]) == len(strict_lines(tmp_path)) > sum(len(part.pairs) for part in plain[0][0]) > 1
    lines = only_file(tmp_path / "whole").read_bytes().splitlines(True)
    draw = random.Random(1)
    parts = [*map(range, range(len(lines) + 1)), *(draw.sample(range(len(lines)), 4) for _ in range(5))]
    for number, kept in enumerate(parts):
        rest = [json.loads(line)[0][0] for row, line in enumerate(lines) if row not in kept]
        half = lines[len(kept)][: draw.randrange(5, 40)] if number % 2 and len(kept) < len(lines) else b""
        (directory := tmp_path / str(number)).mkdir()
        (directory / "rank_0.jsonl").write_bytes(b"".join(lines[row] for row in kept) + half)
        samples = rest.count("sample")
        assert collect(team, asker(), iterative, directory) == (plain[0], (samples, len(rest) - samples))
        assert collect(team, asker(), iterative, directory) == (plain[0], (0, 0))
    if asker is not OddJudge:  # of a corrected reward nothing is known, and the samples stay
        corrected = collect(team, asker(1), iterative)
        assert collect(team, asker(1), iterative, directory) == (corrected[0], (0, corrected[1][1]))


NOTES = {}


class Paid:
    """``text_reward``; what its calls cost is noted outside of it. It raises at one call, and may count for itself."""

    def __init__(self, log, at=None, counts=False):
        NOTES[id(self)], self.calls = (log, at, counts), 0  # elsewhere: with other attributes it is another reward

    def __call__(self, *completions):
        log, at, counts = NOTES[id(self)]
        self.calls += counts
        log.append(completions)
        if len(log) - 1 == at:
            raise runs.StopError
        return runs.text_reward(*completions)


class Probe(RoundCallback):
    """Whether there are a journal and the round's checkpoint, after collection and at each batch; stops in a round."""

    def __init__(self, root, stop=None):
        self.root, self.stop, self.seen = root, stop, set()

    def look(self, event, number):
        checkpoint = self.root / "checkpoints" / f"round_{number:04d}.ckpt"
        self.seen.add((event, (self.root / "journal").exists(), checkpoint.exists()))

    def on_round_collected(self, trainer, pl_module, record):
        self.look("collected", record.round)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.look("batch", trainer.datamodule.current_round)
        if trainer.datamodule.current_round == self.stop:
            raise runs.StopError


def start(root, reward, checkpoint=None, callbacks=(), save=True, rounds=2, team=None, make=runs.make_module, **data):
    """One fit with logs of its own; what it ends with: weights, round files, whether there is a journal."""
    callbacks = [*callbacks, *([ModelCheckpoint(root / "checkpoints")] if save else [])]
    options = {"logger": CSVLogger(root, "logs"), "max_epochs": -1, "enable_checkpointing": save}
    trainer, learner = runs.make_trainer(root, callbacks, **options), make(runs.make_team(True, **(team or {})), rounds)
    with suppress(OracleError, runs.StopError):
        path = checkpoint and str(root / "checkpoints" / checkpoint)
        trainer.fit(learner, runs.make_data(reward, eval_items=None, **data), ckpt_path=path, weights_only=True)
    files = {name: found for place in root.glob("logs/*/replay") for name, found in runs.round_files(place).items()}
    weights = {name: value.tolist() for name, value in learner.named_parameters() if value.requires_grad}
    return weights, files, (root / "journal").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return start(tmp_path_factory.mktemp("whole"), Paid([]))


@pytest.mark.parametrize("counts", [False, True], ids=["plain", "counting"])
@pytest.mark.parametrize("at", [0, 3, 5, 6, 9, 11])
def test_a_reward_that_raises_is_paid_once(tmp_path, whole, at, counts):
    start(tmp_path, Paid(log := [], at, counts))
    assert [key[0] for key, _ in strict_lines(tmp_path / "journal")].count("score") == at % CALLS * 4
    assert start(tmp_path, Paid(log, None, counts), "round_0001.ckpt" if at >= CALLS else None) == whole
    assert (len(log), whole[2]) == (2 * CALLS + 1, False)


def test_a_run_that_collected_nothing_is_started_again_in_the_same_place(tmp_path, whole):
    start(tmp_path, Paid(log := [], 3), replay_dir=str(tmp_path / "logs" / "mine" / "replay"))
    assert start(tmp_path, Paid(log), replay_dir=str(tmp_path / "logs" / "mine" / "replay")) == whole
    assert len(log) == 2 * CALLS + 1


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"items": [*runs.ITEMS[:2], {"prompt": "C"}]}, {"sampling": SamplingConfig(1.5, 1.0, 8, 2)},
     {"comparator": CurrentComparator(3)}, {"team": {"formatters": "{prompt}!"}}],
    ids=["seed", "item", "sampling", "comparator", "formatter"],
)  # fmt: skip
def test_a_run_with_other_options_takes_nothing_over(tmp_path, change):
    start(tmp_path / "one", Paid([], 4))
    ends = [start(tmp_path / name, Paid(log := []), rounds=1, **change) for name in ("one", "two")]
    assert ends[0][:2] == ends[1][:2]
    assert len(log) == CALLS


@pytest.mark.parametrize("save", [True, False], ids=["checkpoints", "none"])
def test_the_journal_stays_until_a_checkpoint_holds_the_pairs(tmp_path, whole, save):
    assert start(tmp_path, Paid([]), callbacks=[probe := Probe(tmp_path)], save=save) == whole
    assert probe.seen == {("collected", True, False), ("batch", not save, save)}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_the_checkpoint_of_a_round(tmp_path, whole, monkeypatch, when, number):
    name, save = f"round_{number:04d}.ckpt", L.Trainer.save_checkpoint

    def killed(trainer, path, *arguments, **options):
        if Path(path).name != name or when == "after":
            save(trainer, path, *arguments, **options)
        if Path(path).name == name:
            raise runs.StopError

    with monkeypatch.context() as patched:
        patched.setattr(L.Trainer, "save_checkpoint", killed)
        start(tmp_path, Paid(log := []))
    assert len(log) == number * CALLS
    assert strict_lines(tmp_path / "journal")
    last = number - (when == "before")
    assert start(tmp_path, Paid(log), f"round_{last:04d}.ckpt" if last else None) == whole
    assert len(log) == 2 * CALLS


def make_marlhf(team, rounds):
    short = {"num_reward_epochs": 1, "num_train_epochs": 1, "num_generations": 2, "learning_rate": 1e-3}
    return MARLHFModule(team, num_iterations=rounds, reward_model=JointRewardModel("team"), **short)


MARLHF = {"make": make_marlhf, "pairs_per_sample": 1, "preference_scoring_reward": "reward_model"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, MARLHF], ids=["madpo", "marlhf"])
def test_resumed_from_the_checkpoint_of_each_round(tmp_path, kind):
    whole = start(tmp_path / "whole", Paid(log := []), rounds=3, **kind)
    for number in (1, 2, 3):
        root, name = tmp_path / str(number), f"round_{number:04d}.ckpt"
        start(root, Paid(again := []), callbacks=[Probe(root, number)], rounds=3, **kind)
        assert [path.name for path in (root / "checkpoints").glob("round*")] == [name]
        assert start(root, Paid(again), name, rounds=3, **kind) == whole
        assert again == log


def test_a_run_resumed_elsewhere_removes_nothing_of_the_first(tmp_path, whole):
    start(tmp_path / "one", Paid([]), callbacks=[Probe(tmp_path / "one", 1)])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert start(tmp_path / "two", Paid([]), "round_0001.ckpt")[0] == whole[0]
    assert (tmp_path / "one" / "checkpoints" / "round_0001.ckpt").exists()
