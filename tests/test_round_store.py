"""The store of a run's rounds: ownership, sha256, replacing rounds, resume."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.preferences import round_files
from pbrl_lightning.preferences.round_files import (
    ForeignReplayError,
    RoundEntry,
    RoundFileError,
    RoundStore,
    read_round_file,
    write_round_file,
)


def make_pair(number=0):
    return PreferencePair([f"h {number}", "Größe"], ["a", "b\n"], ["c", ""], 0.5 + number, 0.25, 0.63)


def make_pairs(count, start=0):
    return [make_pair(start + number) for number in range(count)]


def open_store(directory, run_id="run-a"):
    store = RoundStore(directory)
    store.open(run_id)
    return store


def test_store_writes_and_reads(tmp_path):
    store = open_store(tmp_path / "deep" / "replay")
    entry = store.write(1, make_pairs(3))
    assert (entry.iteration, entry.file, entry.num_pairs) == (1, "iteration_0001.json", 3)
    store.write(2, [])
    assert store.read(1) == make_pairs(3)
    assert store.read(2) == []
    assert json.loads((tmp_path / "deep" / "replay" / "run.json").read_text(encoding="utf-8")) == {"run_id": "run-a"}
    assert sorted(os.listdir(tmp_path / "deep" / "replay")) == [
        "iteration_0001.json",
        "iteration_0002.json",
        "run.json",
    ]
    with pytest.raises(ValueError, match=r"`iteration` must be a stored round \(1, 2\), got 3"):
        store.read(3)


def test_fetch_gives_the_same_pairs_in_the_asked_order(tmp_path):
    store = open_store(tmp_path)
    for iteration in (1, 2, 3):
        store.write(iteration, make_pairs(4, start=10 * iteration) if iteration != 2 else [])
    selection = [(3, 2), (1, 0), (3, 0), (3, 2), (1, 3)]
    assert store.fetch(selection) == [store.read(iteration)[index] for iteration, index in selection]
    assert store.fetch([]) == []
    with pytest.raises(ValueError, match="the pair index must be from 0 to 3, got 4"):
        store.fetch([(1, 4)])


def test_reading_parses_once_and_fetching_parses_only_what_is_asked(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    for iteration in range(1, 21):
        store.write(iteration, make_pairs(5))
    parsed = []
    original = round_files.pair_from_record

    def counting(record, *, file, index):
        parsed.append((Path(file).name, index))
        return original(record, file=file, index=index)

    monkeypatch.setattr(round_files, "pair_from_record", counting)
    store.fetch([(iteration, 1) for iteration in range(1, 21)] * 3)
    assert len(parsed) == 20
    first = store.read(7)
    assert store.read(7) is first


def test_a_changed_or_missing_file_is_found_out(tmp_path):
    store = open_store(tmp_path)
    store.write(1, make_pairs(2))
    store.read(1)
    path = tmp_path / "iteration_0001.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"0.63", b"0.64", 1) + b" ")
    for access in (lambda: store.read(1), lambda: store.fetch([(1, 0)])):
        with pytest.raises(RoundFileError, match=r"iteration_0001.json was changed since it was stored"):
            access()
    path.write_bytes(data)
    assert store.read(1) == make_pairs(2)
    path.unlink()
    for access in (lambda: store.read(1), lambda: store.fetch([(1, 0)])):
        with pytest.raises(RoundFileError, match=r"iteration_0001.json of round 1 cannot be read"):
            access()


def test_fault_B88_a_resumed_run_overwrites_later_rounds_and_counts_none_twice(tmp_path):
    store = open_store(tmp_path)
    store.write(1, make_pairs(2))
    state = json.loads(json.dumps(store.state_dict()))  # plain containers
    store.write(2, make_pairs(7))
    store.write(3, make_pairs(8))

    resumed = RoundStore(tmp_path)
    resumed.load_state_dict(state)
    resumed.open()
    assert [(e.iteration, e.num_pairs) for e in resumed.entries] == [(1, 2)]
    assert resumed.read(1) == make_pairs(2)
    resumed.write(2, make_pairs(3, start=50))
    assert [(e.iteration, e.num_pairs) for e in resumed.entries] == [(1, 2), (2, 3)]
    assert resumed.read(2) == resumed.fetch([(2, 0), (2, 1), (2, 2)]) == make_pairs(3, start=50)
    # The interrupted process's view of round 2 is gone; it is told.
    with pytest.raises(RoundFileError, match="was changed"):
        store.read(2)


def test_writing_an_earlier_round_drops_later_entries_and_their_cache(tmp_path):
    store = open_store(tmp_path)
    for iteration in (1, 2, 3):
        store.write(iteration, make_pairs(iteration))
        store.read(iteration)
    store.write(2, make_pairs(5))
    assert [entry.iteration for entry in store.entries] == [1, 2]
    assert store.read(2) == make_pairs(5)
    store.write(3, make_pairs(1))
    assert store.read(3) == make_pairs(1)


def test_a_hard_link_keeps_the_old_bytes(tmp_path):
    """Checkpoints link round files: a rewritten round must not change them."""
    store = open_store(tmp_path)
    store.write(1, make_pairs(2))
    os.link(tmp_path / "iteration_0001.json", tmp_path / "kept.json")
    store.write(1, make_pairs(3))
    assert read_round_file(tmp_path / "kept.json") == make_pairs(2)


def test_state_restores_in_another_directory_that_holds_the_bytes(tmp_path):
    store = open_store(tmp_path / "a")
    store.write(1, make_pairs(2))
    moved = open_store(tmp_path / "b")
    (tmp_path / "b" / "iteration_0001.json").write_bytes((tmp_path / "a" / "iteration_0001.json").read_bytes())
    moved.load_state_dict(store.state_dict())
    assert moved.read(1) == make_pairs(2)
    assert moved.entries == [RoundEntry(1, "iteration_0001.json", 2, store.entries[0].sha256)]


def test_another_run_is_refused_and_told_what_to_do(tmp_path):
    open_store(tmp_path).write(1, make_pairs(1))
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    with pytest.raises(ForeignReplayError, match=r"belongs to run 'run-a', not to this run 'run-b'; choose another"):
        open_store(tmp_path, "run-b")
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before
    assert open_store(tmp_path).entries == []  # the same run; its files are not imported, the index decides


def test_rounds_without_an_owner_and_a_damaged_claim_are_refused(tmp_path):
    write_round_file(tmp_path / "iteration_0001.json", 1, make_pairs(1))
    with pytest.raises(ForeignReplayError, match=r"holds round files of an unknown run \(iteration_0001.json"):
        open_store(tmp_path)
    for text in ("", "{}", "[1]", '{"run_id": 3}', '{"run_id": "ru'):
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(ForeignReplayError, match=r"run.json must hold a `run_id`, and does not; choose another"):
            open_store(tmp_path)


def test_other_files_in_the_directory_do_not_matter(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    open_store(tmp_path).write(1, [])


def test_of_two_runs_that_claim_at_once_one_gets_the_directory(tmp_path, monkeypatch):
    late = RoundStore(tmp_path)
    real = RoundStore._refuse_unowned_rounds

    def first_the_other(self):
        real(self)
        if self is late:
            open_store(tmp_path, "run-a")

    monkeypatch.setattr(RoundStore, "_refuse_unowned_rounds", first_the_other)
    with pytest.raises(ForeignReplayError, match="belongs to run 'run-a'"):
        late.open("run-b")
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_file_system_without_links_is_claimed_too(tmp_path, monkeypatch):
    def no_links(*arguments):
        raise PermissionError("links are not supported")

    monkeypatch.setattr(round_files.os, "link", no_links)
    open_store(tmp_path)
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_directory_that_cannot_be_made_or_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=rf"`replay_dir` must be a directory that can be written to, got {path}: "):
            open_store(path)
    monkeypatch.setattr(round_files.os, "access", lambda *arguments: False)
    with pytest.raises(PermissionError, match=r"got .*/locked: no permission to write"):
        open_store(tmp_path / "locked")


def test_misuse_of_the_store(tmp_path):
    with pytest.raises(RuntimeError, match="must be opened before it is written to"):
        RoundStore(tmp_path, "run-a").write(1, [])
    with pytest.raises(ValueError, match="`run_id` must be a non-empty text, got none"):
        RoundStore(tmp_path).open()
    with pytest.raises(ValueError, match="`run_id` must be 'run-a' as before, got 'run-b'"):
        RoundStore(tmp_path, "run-a").open("run-b")
    with pytest.raises(ForeignReplayError, match="was opened by run 'run-a', the checkpoint is of run 'run-b'"):
        open_store(tmp_path).load_state_dict({"run_id": "run-b", "entries": []})


def test_fault_B94_names_are_legal_on_windows(tmp_path):
    names = []
    original = round_files.os.replace
    store = open_store(tmp_path, run_id="org/name:tag 2026-01-01T10:00:00")
    round_files.os.replace = lambda a, b: (names.extend([Path(a).name, Path(b).name]), original(a, b))
    try:
        store.write(12345, make_pairs(1))
    finally:
        round_files.os.replace = original
    assert "iteration_12345.json" in names
    assert not any(
        set('<>:"/\\|?*') & set(name) or name.endswith((".", " ")) for name in [*names, *os.listdir(tmp_path)]
    )
    assert open_store(tmp_path, run_id="org/name:tag 2026-01-01T10:00:00").run_id.startswith("org/")


def test_fault_B89_stray_temporary_files_are_ignored_and_names_never_shared(tmp_path, monkeypatch):
    (tmp_path / ".iteration_0001.json.0123.tmp").write_text('{"iter')
    store = open_store(tmp_path)
    renamed = []
    original = os.replace
    monkeypatch.setattr(round_files.os, "replace", lambda a, b: (renamed.append(Path(a)), original(a, b)))
    store.write(1, make_pairs(2))
    store.write(1, make_pairs(2))
    assert store.read(1) == make_pairs(2)
    assert len(set(renamed)) == 2
    assert {path.parent for path in renamed} == {tmp_path}


def test_fault_B93_a_bad_value_never_loses_what_was_stored(tmp_path):
    store = open_store(tmp_path)
    entry = store.write(1, make_pairs(2))
    for bad in (torch.ones(2), "high", object()):
        with pytest.raises(RoundFileError, match=r"iteration_0001.json, pair 0:"):
            store.write(1, [replace(make_pair(), winner_reward=bad)])
    with pytest.raises(RoundFileError, match=r"pair 0: `prompts` must be a list of texts"):
        store.write(1, [replace(make_pair(), prompts=[1, 2])])
    assert store.entries == [entry]
    assert store.read(1) == make_pairs(2)
