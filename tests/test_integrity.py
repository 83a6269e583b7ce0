"""Checkpoints whose bytes were changed are not read, and `pbrl check` finds them."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from pbrl_lightning import AgentTeam, HistoryComparator, MADPOModule
from pbrl_lightning.checkpoints import DurableCheckpointIO
from pbrl_lightning.cli import main
from pbrl_lightning.commands.check import check_path
from pbrl_lightning.integrity import verify_archive
from pbrl_lightning.utils.errors import ConfigurationError
from training_runs import make_data, make_module, make_team, make_trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; to be copied before it is changed."""
    root = tmp_path_factory.mktemp("finished")
    saver = ModelCheckpoint(root / "checkpoints", "last")
    trainer = make_trainer(root, [saver], enable_checkpointing=True)
    trainer.fit(make_module(make_team(True), rounds=2), make_data(comparator=HistoryComparator(1)))
    return root


@pytest.fixture
def run(finished, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("journal"))
    return root


def zero_weights(path, count=64):
    """Zeroes bytes in the middle of the largest tensor."""
    with zipfile.ZipFile(path) as archive:
        tensors = [record for record in archive.infolist() if Path(record.filename).parent.name == "data"]
        largest = max(tensors, key=lambda record: record.file_size)
        content = archive.read(largest)
    data = bytearray(path.read_bytes())
    start = data.find(content) + len(content) // 2
    assert any(data[start : start + count])
    data[start : start + count] = bytes(count)
    path.write_bytes(data)


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    return first == second


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_resume_with_changed_weights_stops(run, wrapped):
    path = run / "checkpoints" / "last.ckpt"
    zero_weights(path)
    torch.load(path, weights_only=True)  # torch itself sees nothing
    plugins = [AsyncCheckpointIO(DurableCheckpointIO())] if wrapped else None
    trainer = make_trainer(run, [ModelCheckpoint(run / "checkpoints")], enable_checkpointing=True, plugins=plugins)
    with pytest.raises(ConfigurationError, match=r"last\.ckpt is damaged: .*Bad CRC-32 for file 'archive/data/\d+'"):
        trainer.fit(make_module(make_team(True), rounds=3), make_data(comparator=HistoryComparator(1)), ckpt_path=path)


@pytest.mark.parametrize("read", [AgentTeam.from_checkpoint, MADPOModule.load_from_checkpoint])
def test_models_from_changed_checkpoints_are_refused(run, read):
    path = run / "checkpoints" / "last.ckpt"
    zero_weights(path)
    with pytest.raises(ConfigurationError, match=r"last\.ckpt is damaged"):
        read(path)


def test_changed_bytes_anywhere_are_found_or_change_nothing(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = {f"w{index}": torch.randn(37 + index, generator=generator) for index in range(4)}
    original = {"state_dict": weights, "round": 3, "text": "a" * 50}
    path = tmp_path / "a.ckpt"
    DurableCheckpointIO().save_checkpoint(original, path)
    data = path.read_bytes()
    found = 0
    for start in range(0, len(data), 7):
        changed = bytearray(data)
        changed[start : start + 8] = bytes(value ^ 0x5A for value in changed[start : start + 8])
        path.write_bytes(changed)
        try:
            loaded = DurableCheckpointIO().load_checkpoint(path)
        except ConfigurationError as error:
            assert "a.ckpt" in str(error)  # noqa: PT017
            found += 1
        else:
            assert same(original, loaded)
    assert found > len(data) // 7 // 4


def test_files_without_checksums_are_still_read(tmp_path):
    value = {"state_dict": {"w": torch.ones(5)}}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, tmp_path / "without.ckpt")
        DurableCheckpointIO().save_checkpoint(value, tmp_path / "ours.ckpt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(value, tmp_path / "legacy.ckpt", _use_new_zipfile_serialization=False)
    torch.save(value, tmp_path / "plain.ckpt")
    counts = {name: verify_archive(tmp_path / f"{name}.ckpt") for name in ("without", "legacy", "plain", "ours")}
    assert (counts["without"], counts["legacy"]) == (0, 0)
    assert counts["plain"] == counts["ours"] > 3
    for path in Path(tmp_path).iterdir():
        assert same(value, DurableCheckpointIO().load_checkpoint(path))


def test_a_compressed_record_is_refused_before_it_grows(tmp_path):
    torch.save({"w": torch.ones(5)}, tmp_path / "a.ckpt")
    with zipfile.ZipFile(tmp_path / "a.ckpt", "a") as archive:
        archive.writestr("a/bomb", bytes(10**6), zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigurationError, match=r"'a/bomb' is compressed"):
        verify_archive(tmp_path / "a.ckpt")


def problems(path):
    return {str(found.path.relative_to(path)): found.problem for found in check_path(path) if found.problem}


def test_a_whole_run_is_found_whole(run, capsys):
    main(["check", str(run)])
    lines = capsys.readouterr().out.splitlines()
    counts = [
        line for line in lines if line.startswith(f"{run}/checkpoints/last.ckpt: checkpoint of MADPOModule, step")
    ]
    assert len(counts) == 1
    assert "records match their checksums, 2 round files in place" in counts[0]
    assert f"{run}/replay/iteration_0002.json: round file, 12 pairs" in lines
    assert lines[-1].endswith(" checked, none is damaged")
    assert {"initial", "iteration_0001"} <= {line.split("/")[-3] for line in lines if ".safetensors" in line}
    assert not problems(run)


def zero(path):
    zero_weights(path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def edit(path):
    """Changes a text in place, so that a hard link elsewhere changes too."""
    data = path.read_bytes()
    assert b'"winner_reward": ' in data
    with path.open("r+b") as file:
        file.write(data.replace(b'"winner_reward": ', b'"winner_reward":\t', 1))


def unlinked_edit(path):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b'"winner_reward": ', b'"winner_reward":\t', 1))


def no_owner(path):
    path.write_text("{}")


DAMAGE = {
    "a checkpoint's weights": ("checkpoints/last.ckpt", zero, "bytes were changed after it was written", 1),
    "a cut checkpoint": ("checkpoints/last.ckpt", cut, "is not a whole checkpoint", 1),
    "a checkpoint that is something else": ("checkpoints/last.ckpt", no_owner, "is not a whole checkpoint", 1),
    "a cut round file": ("replay/iteration_0001.json", cut, "iteration_0001", None),
    "a changed round file": ("replay/iteration_0001.json", unlinked_edit, "a resumed run restores it from", 1),
    "a round file changed through a link": ("replay/iteration_0001.json", edit, "bytes were changed", None),
    "a cut adapter": ("history/initial/agent_0/adapter_model.safetensors", cut, "", 1),
    "an owner": ("replay/run.json", no_owner, "must hold a `run_id`", 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_kind_of_damage_is_named(run, damage, capsys):
    name, change, words, count = DAMAGE[damage]
    if change is cut and "replay" in name:
        (run / name).write_bytes(b"")  # not through a link
    else:
        change(run / name)
    found = problems(run)
    assert name in found
    assert words in found[name] or change is cut
    assert count is None or len(found) == count
    with pytest.raises(SystemExit) as ended:
        main(["check", str(run)])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert f"{run / name}: DAMAGED: " in out
    assert f"error: {len(found)} of " in err
    assert name in err
    with pytest.raises(SystemExit):
        main(["check", str(run / name)])


def test_a_checkpoint_without_its_round_files_is_named(run):
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    data = next(value for value in checkpoint.values() if isinstance(value, dict) and "store" in value)
    data["replay_dir"] = str(run / "replay")
    torch.save(checkpoint, run / "checkpoints" / "last.ckpt")
    for path in run.rglob("iteration_0002*.json"):
        path.unlink()
    assert "file of round 2 that it needs is in neither" in problems(run)["checkpoints/last.ckpt"]


def test_files_of_pairs_are_checked(tmp_path, capsys):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["check", str(good)])
    assert capsys.readouterr().out == f"{good}: 3 pairs of 1 agent\n1 checked, none is damaged\n"
    bad.write_text(good.read_text() + '{"prompt": "a", "chosen": 3}\n')
    with pytest.raises(SystemExit) as ended:
        main(["check", str(good), str(bad)])
    assert ended.value.code == 1
    assert f"{bad}: DAMAGED: , line 4" not in (out := capsys.readouterr().out)
    assert "line 4" in out


def test_shards_are_checked_as_far_as_they_have_checksums(tmp_path):
    shards = tmp_path / "a.ckpt"
    (shards / "checkpoint").mkdir(parents=True)
    torch.save({"w": torch.ones(500)}, shards / "checkpoint" / "mp_rank_00_model_states.pt")
    (shards / "__0_0.distcp").write_bytes(b"tensors")
    assert [found.content for found in check_path(tmp_path)] == [
        "sharded checkpoint, 7 records match their checksums, 1 file without any"
    ]
    zero_weights(shards / "checkpoint" / "mp_rank_00_model_states.pt")
    assert "a.ckpt" in problems(tmp_path)


@pytest.mark.parametrize(("name", "words"), [("missing", "does not exist"), ("empty", "has no checkpoint")])
def test_nothing_to_check_is_an_error_of_the_command_line(tmp_path, capsys, name, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / name)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_checking_changes_nothing(run):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}

    before = state()
    assert not problems(run)
    assert state() == before
