"""Checkpoints whose bytes were changed are not read, and `pbrl check` finds them."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from pbrl_lightning import AgentTeam, HistoryComparator, MADPOModule
from pbrl_lightning.checkpoints import DurableCheckpointIO
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
