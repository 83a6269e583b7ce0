"""Checkpoints are whole or not there, and what comes from elsewhere neither runs nor leads out of its directory."""

import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pbrl_lightning import AgentTeam, CurrentComparator, HistoryComparator, LoraOptions, MADPOModule
from pbrl_lightning.agents.loading import tiny_model, tiny_tokenizer
from pbrl_lightning.checkpoints import DurableCheckpointIO, newest_checkpoint
from pbrl_lightning.cli import main
from pbrl_lightning.preferences.round_files import RoundFileError, read_round_file, write_round_file
from pbrl_lightning.utils.errors import ConfigurationError
from training_runs import make_data, make_module, make_team, make_trainer, round_files, weights_of


def save(path, value):
    DurableCheckpointIO().save_checkpoint({"value": value}, path)


def load(path):
    return DurableCheckpointIO().load_checkpoint(path)["value"]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (events.append("sync"), fsync(number))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b))[1])
    save(tmp_path / "a.ckpt", 1)
    assert events == ["sync", "rename", "sync"]  # the file, its name, the directory
    assert load(tmp_path / "a.ckpt") == 1
    assert names(tmp_path) == ["a.ckpt"]


def full_disk(monkeypatch, tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            if self.tell() > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode.replace("b", "")))
    return OSError, "No space left on device"


def file_limit(monkeypatch, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[0][1]))
    monkeypatch.callback = lambda: (
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0]),
        signal.signal(signal.SIGXFSZ, before[1]),
    )
    return OSError, "File too large"


def no_permission(monkeypatch, tmp_path):
    def refuse(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    return PermissionError, "Permission denied"


@pytest.mark.parametrize("obstacle", [full_disk, file_limit, no_permission])
def test_what_cannot_be_written_raises_and_the_old_file_stays(tmp_path, monkeypatch, obstacle):
    save(tmp_path / "a.ckpt", torch.zeros(10))
    with monkeypatch.context() as patched:
        error, words = obstacle(patched, tmp_path)
        try:
            with pytest.raises(error, match=f"could not be written .*{words}.*a.ckpt"):
                save(tmp_path / "a.ckpt", torch.ones(100_000))
        finally:
            getattr(patched, "callback", lambda: None)()
    assert not load(tmp_path / "a.ckpt").any()
    assert names(tmp_path) == ["a.ckpt"]


def test_a_run_whose_checkpoint_cannot_be_written_stops(tmp_path, monkeypatch):
    def refuse(path, write, exclusive=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pbrl_lightning.checkpoints.write_atomically", refuse)
    trainer = make_trainer(tmp_path, [ModelCheckpoint(tmp_path / "c")], enable_checkpointing=True)
    with pytest.raises(PermissionError, match=r"could not be written \(Permission denied\)"):
        trainer.fit(make_module(rounds=1), make_data())
    # The round's pairs were not safe, so what was collected is kept.
    assert list((tmp_path / "journal").rglob("rank_0-*.jsonl"))


def test_fault_B90_the_newest_whole_checkpoint_is_found(tmp_path):
    for number, name in enumerate(["old.ckpt", "sub/good.ckpt", "cut.ckpt", "empty.ckpt", "html.ckpt"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        save(path, number)
        os.utime(path, (1000 + number, 1000 + number))
    times = (tmp_path / "cut.ckpt").stat()
    for name, data in {"cut": (tmp_path / "cut.ckpt").read_bytes()[:-30], "empty": b"", "html": b"<html>"}.items():
        (tmp_path / f"{name}.ckpt").write_bytes(data)
        os.utime(tmp_path / f"{name}.ckpt", (times.st_atime + 5, times.st_mtime + 5))
    with pytest.warns(UserWarning, match="is not whole and is passed over") as caught:
        assert newest_checkpoint(tmp_path) == tmp_path / "sub" / "good.ckpt"
    told = " ".join(str(warning.message) for warning in caught)
    assert all(f"{name}.ckpt" in told for name in ("cut", "empty", "html"))
    with pytest.raises(FileNotFoundError, match="there is no whole checkpoint"):
        newest_checkpoint(tmp_path / "nowhere")


@pytest.mark.slow
def test_the_command_line_resumes_from_a_runs_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(Path(__file__).parent.parent / "configs/debug/madpo_iter.yaml")
    options = ["--config", config, "--trainer.default_root_dir=run"]
    main(["fit", *options, "--model.init_args.num_iterations=2"])
    main(["fit", *options, "--model.init_args.num_iterations=3", "--ckpt_path=run/lightning_logs/version_0"])
    # The third round alone is new, and goes where the others are.
    assert len(round_files("run/lightning_logs/version_0/replay")) == 3
    assert not Path("run/lightning_logs/version_1/replay").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, its checkpoint and its round files; to be copied before it is changed."""
    root = tmp_path_factory.mktemp("finished")
    saver = ModelCheckpoint(root / "c", "last")
    trainer = make_trainer(root, [saver], enable_checkpointing=True)
    trainer.fit(make_module(make_team(True), rounds=2), make_data(comparator=HistoryComparator(1)))
    return root


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def resume(root, checkpoint, where, rounds=3):
    saver = ModelCheckpoint(where / "c", "last")
    trainer = make_trainer(where, [saver], enable_checkpointing=True)
    team = make_team(True)
    data = make_data(comparator=HistoryComparator(1))
    trainer.fit(make_module(team, rounds=rounds), data, ckpt_path=str(checkpoint))
    return team


def changed(finished, tmp_path, change):
    """A copy of the finished run whose checkpoint was changed."""
    root = tmp_path / "copy"
    shutil.copytree(finished, root)
    checkpoint = torch.load(root / "c" / "last.ckpt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, root / "c" / "last.ckpt")
    return root / "c" / "last.ckpt"


def data_state(checkpoint):
    return next(value for value in checkpoint.values() if isinstance(value, dict) and "store" in value)


def callback_state(checkpoint, name):
    return next(value for key, value in checkpoint["callbacks"].items() if name in key)


def outside(finished, tmp_path):
    """A file that lies beside the run, and must stay as it is."""
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("iteration_0001.json", "round_0002.ckpt", "keep.txt"):
        (victim / name).write_text("mine")
    return victim


@pytest.mark.parametrize("form", ["whole file", "inside"])
def test_hostile_1_2_a_checkpoint_with_a_pickle_runs_nothing(finished, tmp_path, form):
    bomb = Bomb(tmp_path / "exploded")
    path = changed(finished, tmp_path, lambda checkpoint: None)
    if form == "whole file":
        path.write_bytes(pickle.dumps(bomb))
    else:
        checkpoint = torch.load(path, weights_only=True)
        torch.save({**checkpoint, "extra": bomb}, path)
    with pytest.raises(ConfigurationError, match=r"holds objects besides tensors .* is not loaded") as refused:
        resume(finished, path, tmp_path / "resumed")
    assert isinstance(refused.value.__cause__, pickle.UnpicklingError)
    assert not (tmp_path / "exploded").exists()


def test_hostile_3_an_instantiator_in_a_checkpoint_is_not_called(finished, tmp_path):
    def name_it(checkpoint):
        checkpoint["hyper_parameters"] = {"_instantiator": "os.system", "command": f"touch {tmp_path}/exploded"}

    path = changed(finished, tmp_path, name_it)
    with pytest.raises(Exception, match=r"."):
        MADPOModule.load_from_checkpoint(path, team=None)
    assert not (tmp_path / "exploded").exists()


NAMES = [
    "../victim/iteration_0001.json",
    "/etc/passwd",
    "{victim}/iteration_0001.json",
    "iteration_0001.json/..",
    "run.json",
]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_4_5_a_round_file_outside_of_its_directory_is_refused(finished, tmp_path, name):
    victim = outside(finished, tmp_path)
    path = changed(
        finished,
        tmp_path,
        lambda checkpoint: data_state(checkpoint)["store"]["entries"][0].update(file=name.format(victim=victim)),
    )
    with pytest.raises(RoundFileError, match="which is no round file of this library"):
        resume(finished, path, tmp_path / "resumed")
    assert all((victim / kept).read_text() == "mine" for kept in names(victim))


def test_hostile_6_a_replay_directory_of_others_is_not_written_to(finished, tmp_path):
    victim = outside(finished, tmp_path)
    path = changed(finished, tmp_path, lambda checkpoint: data_state(checkpoint).update(replay_dir=str(victim)))
    resume(finished, path, tmp_path / "resumed")
    assert names(victim) == ["iteration_0001.json", "keep.txt", "round_0002.ckpt"]
    assert all((victim / kept).read_text() == "mine" for kept in names(victim))


@pytest.mark.parametrize("named", ["{victim}/round_0002.ckpt", "../victim/round_0002.ckpt", "keep.txt"])
def test_hostile_7_a_checkpoint_names_no_file_to_remove(finished, tmp_path, named):
    victim = outside(finished, tmp_path)
    path = changed(
        finished,
        tmp_path,
        lambda checkpoint: callback_state(checkpoint, "RoundCheckpoint").update(last=named.format(victim=victim)),
    )
    resume(finished, path, tmp_path / "resumed")
    assert len(names(victim)) == 3


def test_hostile_8_a_history_directory_of_others_is_not_written_to(finished, tmp_path):
    victim = outside(finished, tmp_path)
    path = changed(
        finished,
        tmp_path,
        lambda checkpoint: callback_state(checkpoint, "ComparatorHistory").update(directory=str(victim)),
    )
    resume(finished, path, tmp_path / "resumed")
    assert len(names(victim)) == 3


@pytest.mark.parametrize("target", ["replay", "c/replay"])
def test_hostile_9_a_link_in_the_place_of_a_round_file_is_replaced_not_followed(finished, tmp_path, target):
    victim = outside(finished, tmp_path)
    path = changed(finished, tmp_path, lambda checkpoint: None)
    replay = tmp_path / "copy" / "replay"
    data = torch.load(path, weights_only=True)
    data_state(data)["replay_dir"] = str(replay)
    torch.save(data, path)
    (replay / "iteration_0001.json").unlink()
    (replay / "iteration_0001.json").symlink_to(victim / "iteration_0001.json")
    resume(finished, path, tmp_path / "resumed")
    assert all((victim / kept).read_text() == "mine" for kept in names(victim))
    assert not (replay / "iteration_0001.json").is_symlink()


def test_hostile_10_an_adapter_with_a_pickle_runs_nothing(tmp_path):
    team = AgentTeam("builtin:tiny", num_agents=1, lora=LoraOptions(r=2)).load()
    team.save(tmp_path / "export")
    adapter = tmp_path / "export" / "agent_0"
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(Exception, match=r"."):
        AgentTeam([str(adapter)]).load()
    model = tmp_path / "model"
    tiny_model(0).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(Exception, match=r"."):
        AgentTeam([str(model)]).load()
    assert not (tmp_path / "exploded").exists()


def test_hostile_11_a_model_directory_brings_no_code(tmp_path):
    model = tmp_path / "model"
    tiny_model(0).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}, "model_type": "evil"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'exploded')!r}).touch()\n")
    with pytest.raises(Exception, match=r"."):
        AgentTeam([str(model)]).load()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"iteration": 1, "num_pairs": 1, "pairs": ' + b'[{"a":' * 100_000,
        b'{"iteration": 1, "num_pairs": 1e400, "pairs": []}',
        b'{"iteration": 1, "num_pairs": 1, "pairs": [{"prompts": ["a"], "winner_completions": ["b"], '
        b'"loser_completions": ["c"], "winner_reward": NaN, "loser_reward": 0, "candidate_reward_mean": 0}]}',
        b'{"iteration": 1, "num_pairs": 1, "pairs": [{"prompts": ["a"], "winner_completions": ["b"], '
        b'"loser_completions": ["c"], "winner_reward": Infinity, "loser_reward": 0, "candidate_reward_mean": 0}]}',
        b"\x80\x04\x95" + pickle.dumps([1]),
        b"\xff\xfe{}",
    ],
    ids=["deep", "deep records", "huge number", "NaN", "infinity", "pickle", "UTF-16"],
)
def test_hostile_12_a_round_file_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "iteration_0001.json").write_bytes(content)
    with pytest.raises(RoundFileError, match="iteration_0001"):
        read_round_file(tmp_path / "iteration_0001.json")


def test_a_round_file_cut_at_every_byte_is_detected_each_time(finished, tmp_path):
    pairs = read_round_file(next((finished / "replay").glob("iteration_0001.json")))[:2]
    write_round_file(tmp_path / "whole.json", 1, pairs)
    data = (tmp_path / "whole.json").read_bytes()
    cut = tmp_path / "cut.json"
    for length in range(len(data.rstrip())):
        cut.write_bytes(data[:length])
        with pytest.raises(RoundFileError, match=r"cut\.json"):
            read_round_file(cut)


def test_histories_newer_than_the_checkpoint_are_ignored(tmp_path):
    root = tmp_path
    saver = ModelCheckpoint(root / "c", "{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False)
    data = {"comparator": HistoryComparator(1), "replay_dir": str(root / "replay")}
    team = make_team(True)
    trainer = make_trainer(root, [saver], enable_checkpointing=True)
    trainer.fit(make_module(team, rounds=3), make_data(**data))
    # As if the run had gone on after the checkpoint: a history of round 1 with other weights, and rounds to come.
    shutil.rmtree(root / "history" / "iteration_0001", ignore_errors=True)
    shutil.copytree(root / "history" / "iteration_0002", root / "history" / "iteration_0001")
    shutil.copytree(root / "history" / "iteration_0002", root / "history" / "iteration_0007")
    again = make_team(True)
    trainer = make_trainer(root, enable_checkpointing=False)
    trainer.fit(
        make_module(again, rounds=3), make_data(**{**data, "replay_dir": None}), ckpt_path=root / "c" / "1.ckpt"
    )
    for first, second in zip(weights_of(team), weights_of(again), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_runs_comparator_is_not_needed_to_find_out(tmp_path):
    # A fresh run never writes into another one's replay directory.
    make_trainer(tmp_path / "one").fit(make_module(rounds=1), make_data(replay_dir=str(tmp_path / "replay")))
    before = round_files(tmp_path / "replay")
    with pytest.raises(RuntimeError, match="belongs to run"):
        make_trainer(tmp_path / "two").fit(
            make_module(rounds=1), make_data(comparator=CurrentComparator(), replay_dir=str(tmp_path / "replay"))
        )
    assert round_files(tmp_path / "replay") == before
