"""What a checkpoint names is read, written and removed in the run's own directory alone."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from pbrl_lightning import HistoryComparator
from pbrl_lightning.confinement import confine_checkpoint_paths, is_own_checkpoint
from training_runs import Killer, StopError, make_data, make_module, make_team, make_trainer

FORMS = {
    "absolute": "{victim}",
    "local": "local://{victim}",
    "file": "file://{victim}",
    "up": "{dirpath}/../../{name}",
    "up inside of a name": "{dirpath}/sub/../../../{name}",
    "local up": "local://{dirpath}/../../{name}",
    "link": "{dirpath}/link/{inside}",
    "home": "~/{name}",
    "relative": "{relative}",
    "chained": "simplecache::local://{victim}",
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run's directory with a checkpoint in the middle of a round; to be copied before it is changed."""
    root = tmp_path_factory.mktemp("stopped")
    saver = ModelCheckpoint(root / "c", "{step}", every_n_train_steps=1, save_last=True)
    trainer = make_trainer(root, [saver, Killer(2)], enable_checkpointing=True)
    with pytest.raises(StopError):
        trainer.fit(make_module(make_team(True), rounds=2), make_data())
    return root


def resumed(stopped, tmp_path, change, monitor=None):
    """A fit in a copy of the stopped run whose checkpoint was changed."""
    root = tmp_path / "run"
    shutil.copytree(stopped, root, ignore=shutil.ignore_patterns("journal"))
    path = root / "c" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    saver = ModelCheckpoint(root / "c", "{step}", every_n_train_steps=1, save_last=True, monitor=monitor, save_top_k=1)
    change(checkpoint, saver)
    torch.save(checkpoint, path)
    trainer = make_trainer(root, [saver], enable_checkpointing=True)
    trainer.fit(make_module(make_team(True), rounds=2), make_data(), ckpt_path=str(path))
    return saver


def hostile_state(saver, named):
    """All that a ModelCheckpoint may remember, naming one thing."""
    return {
        **saver.state_dict(),
        "best_model_score": torch.tensor(-9.0),
        "best_model_path": named,
        "best_k_models": {named: torch.tensor(-9.0)},
        "kth_best_model_path": named,
        "kth_value": torch.tensor(-9.0),
        "last_model_path": named,
        "unknown": {"deep": [named]},
    }


_QUICK = {("local", "file"), ("up", "directory"), ("link", "file")}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        pytest.param(form, kind, marks=() if (form, kind) in _QUICK else pytest.mark.slow)
        for form in FORMS
        for kind in ("file", "directory")
    ],
)
def test_a_checkpoint_from_elsewhere_names_nothing_to_remove(stopped, tmp_path, monkeypatch, form, kind):
    # The canary lies outside of the run, and once more where `~` and relative paths lead.
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    canaries = []
    for place in (tmp_path, home):
        canary = place / "canary.ckpt"
        if kind == "directory":
            canary.mkdir()
            canary = canary / "precious.ckpt"
        canary.write_text("mine")
        canaries.append(canary)
    victim = tmp_path / "canary.ckpt"

    def name_it(checkpoint, saver):
        (Path(saver.dirpath) / "sub").mkdir()
        (Path(saver.dirpath) / "link").symlink_to(tmp_path)
        values = {"victim": victim, "dirpath": saver.dirpath, "name": victim.name, "inside": victim.name}
        named = FORMS[form].format(**values, relative=os.path.relpath(victim))
        checkpoint["callbacks"][saver.state_key] = hostile_state(saver, named)

    with pytest.warns(UserWarning, match=r"canary\.ckpt' and others|canary\.ckpt' as files of this run"):
        saver = resumed(stopped, tmp_path, name_it)
    assert all(canary.read_text() == "mine" for canary in canaries)
    assert is_own_checkpoint(saver.best_model_path, saver.dirpath)
    assert is_own_checkpoint(saver.last_model_path, saver.dirpath)
    assert Path(saver.best_model_path).is_file()


def test_best_files_by_a_metric_are_confined_too(stopped, tmp_path):
    victim = tmp_path / "canary.ckpt"
    victim.write_text("mine")
    for number in range(2):
        where = tmp_path / str(number)
        where.mkdir()

        def name_it(checkpoint, saver):
            state = hostile_state(saver, f"local://{victim}")
            if number:  # noqa: B023
                state |= {"kth_best_model_path": f"{saver.dirpath}/missing.ckpt", "best_k_models": {}}
            checkpoint["callbacks"][saver.state_key] = state

        resumed(stopped, where, name_it, monitor="train/loss")
        assert victim.read_text() == "mine"


def test_what_lies_in_the_directory_and_is_no_checkpoint_stays(stopped, tmp_path):
    def name_it(checkpoint, saver):
        for name in ("replay/keep.json", "notes.txt"):
            (Path(saver.dirpath) / name).parent.mkdir(exist_ok=True)
            (Path(saver.dirpath) / name).write_text("mine")
        state = hostile_state(saver, f"{saver.dirpath}/replay") | {"last_model_path": f"{saver.dirpath}/notes.txt"}
        checkpoint["callbacks"][saver.state_key] = state

    saver = resumed(stopped, tmp_path, name_it)
    assert (Path(saver.dirpath) / "replay/keep.json").read_text() == "mine"
    assert (Path(saver.dirpath) / "notes.txt").read_text() == "mine"


def test_a_runs_own_files_are_still_replaced_when_it_resumes(stopped, tmp_path, recwarn):
    before = {}

    def rename(checkpoint, saver):
        state = next(value for key, value in checkpoint["callbacks"].items() if "ModelCheckpoint" in key)
        old, new = str(stopped / "c"), saver.dirpath
        before.update(path=state["best_model_path"].replace(old, new))
        moved = {key: value.replace(old, new) if isinstance(value, str) else value for key, value in state.items()}
        checkpoint["callbacks"][saver.state_key] = moved
        assert Path(before["path"]).is_file()

    saver = resumed(stopped, tmp_path, rename)
    assert not Path(before["path"]).exists()
    assert Path(saver.best_model_path).is_file()
    assert not [warning for warning in recwarn if "left alone" in str(warning.message)]


@pytest.mark.parametrize("state", [["a"], "text", {"best_k_models": ["x"]}, {"last_model_path": 3}])
def test_a_state_of_another_shape_is_not_taken_over(tmp_path, state):
    saver = ModelCheckpoint(tmp_path)
    trainer = make_trainer(tmp_path, [saver, OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    checkpoint = {"callbacks": {saver.state_key: state}}
    confine_checkpoint_paths(trainer, checkpoint)
    kept = checkpoint["callbacks"][saver.state_key]
    if kept:
        saver.load_state_dict(kept)
    assert (saver.best_model_path, saver.best_k_models, saver.last_model_path) == ("", {}, "")


@pytest.mark.parametrize(
    ("path", "directory", "own"),
    [
        ("/a/c/x.ckpt", "/a/c", True),
        ("/a/c/sub/x.ckpt", "/a/c", True),
        ("/a/c", "/a/c", False),
        ("/a/cc/x.ckpt", "/a/c", False),
        ("/a/c/x.txt", "/a/c", False),
        ("/a/c/x.ckpt", None, False),
        ("/a/c/\0.ckpt", "/a/c", False),
        (7, "/a/c", False),
        ("local:///a/c/x.ckpt", "local:///a/c", True),
        ("local:///a/c/../x.ckpt", "local:///a/c", False),
        ("memory://a/c/x.ckpt", "memory://a/c", True),
        ("memory://a/d/x.ckpt", "memory://a/c", False),
        ("memory://a/c/../x.ckpt", "memory://a/c", False),
        ("/a/c/x.ckpt", "memory://a/c", False),
    ],
)
def test_own_paths(path, directory, own):
    assert is_own_checkpoint(path, directory) is own


def test_the_history_of_another_run_is_read_and_never_changed(tmp_path):
    data = {"comparator": HistoryComparator(1)}
    saver = ModelCheckpoint(tmp_path / "one" / "c", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(tmp_path / "one", [saver], enable_checkpointing=True)
    trainer.fit(make_module(make_team(True), rounds=2), make_data(**data))
    checkpoint = sorted((tmp_path / "one" / "c").glob("step=*.ckpt"))[-1]

    def listing(root):
        return {path: path.stat().st_mtime_ns for path in (root / "history").rglob("*")}

    before = listing(tmp_path / "one")
    assert before
    trainer = make_trainer(tmp_path / "two", enable_checkpointing=False)
    trainer.fit(make_module(make_team(True), rounds=4), make_data(**data), ckpt_path=str(checkpoint))
    assert listing(tmp_path / "one") == before
    assert (tmp_path / "two" / "history" / "iteration_0003").is_dir()
