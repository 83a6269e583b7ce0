"""Half-written files of killed runs: removed at the next start, unless somebody is still writing them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pbrl_lightning.agents.loading import write_directory
from pbrl_lightning.durable import held, write_atomically
from pbrl_lightning.leftovers import remove_leftovers
from training_runs import make_data, make_module, make_trainer

HEX = "0123456789abcdef0123456789abcdef"
OURS = [
    f".config.yaml.{HEX}.tmp",
    f"checkpoints/.last.ckpt.{HEX}.tmp",
    f"checkpoints/eval/turn_1/.best.ckpt.{HEX}.tmp",
    f"checkpoints/replay/.iteration_0001-00112233.json.{HEX}.tmp",
    f"replay/.iteration_0001.json.{HEX}.tmp",
    "history/iteration_0000/.agent_1.ab_d0123/new/adapter_model.safetensors",
    "export/.agent_0.abcd0123/old/config.json",
    "export/.reward_model.abcd0123/new/config.json",
]
OTHERS = [
    f"config.yaml.{HEX}.tmp",
    ".config.yaml.tmp",
    f".config.yaml.{HEX[:-1]}.tmp",
    f"data/.last.ckpt.{HEX}.tmp",
    "history/iteration_0000/agent_1/config.json",
    "history/.agent_1.ab_d0123/notes.txt",
    ".agent_1.d/config.json",
    "export/.agents.abcd0123/new/config.json",
    "checkpoints/last.ckpt",
]


def lay_out(root, names, age=60.0):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    for path in sorted(root.rglob("*")):
        os.utime(path, (time.time() - age,) * 2)


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    lay_out(tmp_path, OURS + OTHERS)
    (tmp_path / "export" / "agent_0").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"elsewhere/.last.ckpt.{HEX}.tmp").symlink_to(tmp_path / "checkpoints/last.ckpt")
    removed = remove_leftovers(tmp_path, [tmp_path / "elsewhere", tmp_path / "missing"])
    assert len(removed) == len(OURS)
    assert files(tmp_path) == {*OTHERS, f"elsewhere/.last.ckpt.{HEX}.tmp"}
    assert not list(tmp_path.rglob(".agent_1.ab_d0123/new"))


def test_a_link_below_the_run_is_not_followed(tmp_path):
    lay_out(tmp_path / "other", OURS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "run" / ".agent_0.abcd0123").symlink_to(tmp_path / "other" / "export" / ".agent_0.abcd0123")
    assert remove_leftovers(tmp_path / "run") == []
    assert files(tmp_path / "other") == set(OURS)


def test_what_is_being_written_stays(tmp_path):
    def write(file):
        file.write(b"first half")
        lay_out(tmp_path, [], age=60)
        assert remove_leftovers(tmp_path) == []
        file.write(b", second half")

    (tmp_path / "checkpoints").mkdir()
    write_atomically(tmp_path / "checkpoints" / "a.ckpt", write)
    assert (tmp_path / "checkpoints" / "a.ckpt").read_text() == "first half, second half"

    def fill(directory):
        lay_out(tmp_path, ["export/agent_9/config.json"], age=60)
        assert remove_leftovers(tmp_path) == []
        (directory / "config.json").write_text("{}")

    write_directory(tmp_path / "export" / "agent_0", fill)
    assert (tmp_path / "export" / "agent_0" / "config.json").read_text() == "{}"


def test_what_has_just_begun_or_cannot_be_locked_stays(tmp_path, monkeypatch):
    lay_out(tmp_path, OURS, age=0)
    assert remove_leftovers(tmp_path) == []
    lay_out(tmp_path, OURS, age=3600)
    monkeypatch.setattr("pbrl_lightning.durable.fcntl", None)
    assert remove_leftovers(tmp_path) == []
    lay_out(tmp_path, OURS, age=2 * 24 * 3600)
    assert len(remove_leftovers(tmp_path)) == len(OURS)


@pytest.mark.parametrize("whole", [True, False], ids=["new is whole", "only the old one"])
def test_a_directory_killed_between_its_two_renames_is_put_back(tmp_path, whole):
    temporary = tmp_path / "export" / ".agent_0.abcd0123"
    lay_out(tmp_path, [f"{temporary}/old/old.txt", *([f"{temporary}/new/new.txt"] if whole else [])])
    remove_leftovers(tmp_path)
    assert files(tmp_path) == {"export/agent_0/new.txt" if whole else "export/agent_0/old.txt"}


def test_a_killed_writer_holds_nothing(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from pbrl_lightning.durable import write_atomically\n"
        "def write(file):\n    file.write(b'half'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
        "write_atomically(Path(sys.argv[1]), write)\n"
    )
    (tmp_path / "checkpoints").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoints" / "last.ckpt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        lay_out(tmp_path, [])
        assert remove_leftovers(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name.endswith(".tmp") for path in remove_leftovers(tmp_path)] == [True]
    assert files(tmp_path) == set()


def test_the_next_start_in_a_directory_clears_up(tmp_path):
    lay_out(tmp_path, OURS[:2] + OURS[5:6])
    lay_out(tmp_path, ["mine.txt"])
    make_trainer(tmp_path).fit(make_module(rounds=1), make_data())
    assert not [name for name in files(tmp_path) if HEX in name or ".agent_1." in name]
    assert (tmp_path / "mine.txt").exists()


def test_a_lock_is_known_to_be_anothers(tmp_path):
    path = Path(tmp_path / "a")
    path.touch()
    with held(path) as first, held(path) as second:
        assert (first, second) == ("mine", "busy")
    with held(path) as again:
        assert again == "mine"
