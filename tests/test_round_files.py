"""Records, round files and the store of a run's rounds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from pbrl_lightning.batches import PairTokens, PreferencePair
from pbrl_lightning.preferences import round_files
from pbrl_lightning.preferences.round_files import (
    RoundFileError,
    pair_from_record,
    pair_to_record,
    read_pairs,
    read_round_file,
    write_round_file,
)

NINE_KEYS = [
    "prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean",
    "raw_rewards", "target_raw_reward", "comparator_raw_reward",
]  # fmt: skip


def make_pair(number=0, iterative=True):
    raw = {"raw_rewards": [0.92, 0.41], "target_raw_reward": 0.92, "comparator_raw_reward": 0.41}
    return PreferencePair(
        prompts=[f'Größe {number}?\n"quoted" \\n', "二 🎈"],
        winner_completions=["a\u2028b", ""],
        loser_completions=["\t\x00", "]},\n{"],
        winner_reward=0.1 + 0.2 + number,
        loser_reward=-1e-300,
        candidate_reward_mean=0.63,
        **(raw if iterative else {}),
    )


def make_pairs(count, start=0):
    return [make_pair(start + number) for number in range(count)]


def strict(path):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


# Records


def test_a_record_has_exactly_nine_keys_and_no_tokens():
    pair = replace(make_pair(), tokens=PairTokens([[1]], [[2]], [[3]]))
    record = pair_to_record(pair)
    assert list(record) == NINE_KEYS
    assert pair_from_record(record, file="f", index=0) == make_pair()


def test_base_runs_write_empty_raw_rewards_and_readers_accept_them_absent_or_null():
    record = pair_to_record(make_pair(iterative=False))
    assert (record["raw_rewards"], record["target_raw_reward"], record["comparator_raw_reward"]) == ([], None, None)
    expected = pair_from_record(record, file="f", index=0)
    assert expected == make_pair(iterative=False)
    assert pair_from_record({**record, "raw_rewards": None}, file="f", index=0) == expected
    assert pair_from_record({key: record[key] for key in NINE_KEYS[:6]}, file="f", index=0) == expected


@pytest.mark.parametrize("key", NINE_KEYS[:6])
def test_a_missing_key_is_named(key):
    record = pair_to_record(make_pair())
    del record[key]
    with pytest.raises(RoundFileError, match=rf"^some/file.json, pair 3: `{key}` is missing"):
        pair_from_record(record, file="some/file.json", index=3)


BAD_NUMBERS = [True, "1.0", [1.0], {}, float("nan"), float("inf"), -float("inf"), 10**400]
BAD_TEXTS = ["text", [1, 2], ["a", None], None, {"0": "a", "1": "b"}, 3, [True, False]]


@pytest.mark.parametrize("key", NINE_KEYS)
def test_a_mistyped_key_is_named(key):
    record = pair_to_record(make_pair())
    if key in NINE_KEYS[:3]:
        wrong = BAD_TEXTS
    elif key == "raw_rewards":
        wrong = [3.0, "ab", [1.0], [1.0, 2.0, 3.0], *([1.0, bad] for bad in (*BAD_NUMBERS, None))]
    else:
        wrong = [*BAD_NUMBERS, *([None] if key in NINE_KEYS[:6] else [])]
    for value in wrong:
        with pytest.raises(RoundFileError, match=rf"^f.json, pair 0: `{key}` must be"):
            pair_from_record({**record, key: value}, file=Path("f.json"), index=0)


@pytest.mark.parametrize("key", NINE_KEYS[:3])
def test_lists_of_different_length(key):
    record = {**pair_to_record(make_pair()), key: ["a", "b", "c"]}
    named = "winner_completions" if key == "prompts" else key
    with pytest.raises(RoundFileError, match=rf"pair 0: `{named}` must have \d texts like `prompts`, got"):
        pair_from_record(record, file="f", index=0)
    with pytest.raises(RoundFileError, match="`prompts` must have one text per agent, got 0"):
        pair_from_record({**record, **{key: [] for key in NINE_KEYS[:3]}}, file="f", index=0)


def test_a_record_must_be_an_object():
    with pytest.raises(RoundFileError, match="f, pair 1: a pair must be an object, got list"):
        pair_from_record([1], file="f", index=1)


# Round files


def test_round_trip_is_exact(tmp_path):
    path = tmp_path / "iteration_0003.json"
    write_round_file(path, 3, make_pairs(5))
    assert read_round_file(path) == make_pairs(5)
    content = strict(path)
    assert list(content) == ["iteration", "num_pairs", "pairs"]
    assert (content["iteration"], content["num_pairs"]) == (3, 5)
    assert [list(record) for record in content["pairs"]] == [NINE_KEYS] * 5
    assert "二 🎈".encode() in path.read_bytes()
    assert os.listdir(tmp_path) == ["iteration_0003.json"]


def test_fault_B37_a_round_without_pairs_is_a_file(tmp_path):
    write_round_file(tmp_path / "r.json", 1, [])
    assert strict(tmp_path / "r.json") == {"iteration": 1, "num_pairs": 0, "pairs": []}
    assert read_round_file(tmp_path / "r.json") == []


def test_half_an_emoji_survives(tmp_path):
    pair = replace(make_pair(), winner_completions=["cut \ud83d", "\udc00\\"])
    write_round_file(tmp_path / "r.json", 1, [pair])
    assert read_round_file(tmp_path / "r.json") == [pair]


def test_comlrl_files_with_unknown_keys_load(tmp_path):
    record = {
        "prompts": ["h0", "h1"], "winner_completions": ["w0", "w1"], "loser_completions": ["l0", "l1"],
        "winner_reward": 1, "loser_reward": 0.41, "candidate_reward_mean": 0.63, "raw_rewards": [1, 0.41],
        "target_raw_reward": 1, "comparator_raw_reward": 0.41, "agent_tensors": None, "pair_source": {"k": [3]},
    }  # fmt: skip
    content = {"iteration": 2, "num_pairs": 1, "created": "2026-01-01T00:00:00", "pairs": [record]}
    path = tmp_path / "iteration_0002.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (pair,) = read_round_file(path)
    assert pair == PreferencePair(["h0", "h1"], ["w0", "w1"], ["l0", "l1"], 1.0, 0.41, 0.63, [1.0, 0.41], 1.0, 0.41)
    assert type(pair.winner_reward) is float


def test_fault_B89_a_file_truncated_at_any_byte_names_itself(tmp_path):
    path = tmp_path / "iteration_0001.json"
    write_round_file(path, 1, make_pairs(2))
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(RoundFileError, match=r"iteration_0001.json is not a whole JSON file"):
            read_round_file(path)


def test_fault_B89_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "iteration_0001.json"
    write_round_file(path, 1, make_pairs(1))
    old = path.read_bytes()
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def full(*arguments):
                raise OSError("disk full")

            patch.setattr(round_files.os, function, full)
            with pytest.raises(OSError, match="disk full"):
                write_round_file(path, 1, make_pairs(3))
        assert path.read_bytes() == old
        assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pairs": 3}, "`num_pairs` is 3, but there are 2"),
        ({"num_pairs": True}, "`num_pairs` must be of type int, got bool True"),
        ({"pairs": {}}, "`pairs` must be of type list, got dict"),
        ({"iteration": "1"}, "`iteration` must be of type int, got str '1'"),
        ({"num_pairs": None}, "`num_pairs` must be of type int, got NoneType"),
    ],
)
def test_a_wrong_head_names_the_file(tmp_path, change, message):
    path = tmp_path / "r.json"
    write_round_file(path, 1, make_pairs(2))
    path.write_text(json.dumps({**strict(path), **change}), encoding="utf-8")
    with pytest.raises(RoundFileError, match=f"r.json: {message}"):
        read_round_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold an object, got list"),
        ('{"iteration": 1, "num_pairs": 0}', "`pairs` is missing"),
        ('{"iteration": 1, "num_pairs": 0, "pairs": [], "pairs": []}', "a key stands twice: pairs"),
        ('{"iteration": 1, "num_pairs": 1, "pairs": [3]}', "pair 0: a pair must be an object"),
    ],
)
def test_wrong_content_names_the_file(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RoundFileError, match=rf"r.json.*{message}"):
        read_round_file(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan"))], ids=str)
def test_fault_B91_non_finite_numbers_are_never_written_nor_read(tmp_path, bad):
    path = tmp_path / "r.json"
    write_round_file(path, 1, make_pairs(2))
    for change in ({"loser_reward": bad}, {"raw_rewards": [bad, 1.0]}, {"comparator_raw_reward": bad}):
        key = next(iter(change))
        with pytest.raises(RoundFileError, match=rf"r.json, pair 1: `{key}` must be finite, got"):
            write_round_file(path, 1, [make_pair(), replace(make_pair(), **change)])
    assert read_round_file(path) == make_pairs(2)
    text = path.read_text(encoding="utf-8").replace('"loser_reward": -1e-300', '"loser_reward": -Infinity')
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RoundFileError, match=r"pair 0: `loser_reward` must be a finite number, got float -inf"):
        read_round_file(path)


def test_fault_B93_odd_numbers_are_written_plain(tmp_path):
    numbers = [torch.tensor(0.5, requires_grad=True), torch.tensor([0.5], dtype=torch.bfloat16), np.float32(0.5),
               np.array(0.5), Decimal("0.5")]  # fmt: skip
    pairs = [replace(make_pair(), winner_reward=n, raw_rewards=[n, True], target_raw_reward=n) for n in numbers]
    path = tmp_path / "r.json"
    write_round_file(path, 1, pairs)
    for pair in read_round_file(path):
        assert (pair.winner_reward, pair.raw_rewards, pair.target_raw_reward) == (0.5, [0.5, 1.0], 0.5)
        assert type(pair.raw_rewards[1]) is float


def test_iteration_is_checked(tmp_path):
    for wrong in (0, True, 1.0):
        with pytest.raises(ValueError, match="`iteration` must be an integer >= 1, got"):
            write_round_file(tmp_path / "r.json", wrong, [])


def test_read_pairs_joins_files_and_checks_the_list(tmp_path):
    first, second, empty = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    write_round_file(first, 1, make_pairs(2))
    write_round_file(second, 2, make_pairs(1, start=2))
    write_round_file(empty, 3, [])
    assert read_pairs([first, str(second), empty]) == make_pairs(3)
    assert read_pairs(str(first)) == make_pairs(2)
    with pytest.raises(ValueError, match=r"`pairs` must name at least one file or hold .* got an empty list"):
        read_pairs([])
    with pytest.raises(FileNotFoundError, match=r"`pairs` must name existing files, got .*x.json, .*y.json"):
        read_pairs([tmp_path / "x.json", first, tmp_path / "y.json"])
    with pytest.raises(ValueError, match=r"`pairs` must name each file once, got .*a.json again"):
        read_pairs([first, tmp_path / "." / "a.json"])
    with pytest.raises(ValueError, match=r"`pairs` must hold at least one pair, got none in .*c.json"):
        read_pairs([empty])
