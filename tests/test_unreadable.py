"""Files and directories that cannot be read or written end a command in one sentence."""

import errno
import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from pbrl_lightning import AgentTeam, LoraOptions
from pbrl_lightning.agents.adapters import read_adapter
from pbrl_lightning.agents.loading import resolve_source, tiny_model, tiny_tokenizer
from pbrl_lightning.cli import main
from pbrl_lightning.commands import expected
from pbrl_lightning.data_items import load_items
from pbrl_lightning.models.classifier import load_classifier
from pbrl_lightning.utils.errors import ConfigurationError
from training_runs import make_data, make_module, make_trainer

CONFIG = str(Path(__file__).parent.parent / "configs/debug/madpo_iter.yaml")


def message_of(capsys, *args):
    """The one sentence that a command ends with, and its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    sentence, hint = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "(PBRL"))]
    assert hint == "(PBRL_TRACEBACK=1 shows the traceback)"
    return sentence.removeprefix("error: "), ended.value.code


@pytest.mark.parametrize("command", ["fit", "collect", "validate"])
@pytest.mark.parametrize("logger", [True, False])
def test_a_root_that_is_no_directory_is_said_before_anything_is_loaded(tmp_path, capsys, command, logger):
    (tmp_path / "root").write_text("a file")
    options = [f"--trainer.default_root_dir={tmp_path / 'root' / 'x'}", *([] if logger else ["--trainer.logger=false"])]
    said, code = message_of(capsys, command, "--config", CONFIG, *options)
    if command == "validate" and not logger:
        assert "the directory of the run" in said
        assert code == 1
    else:
        assert said.startswith("`default_root_dir` must be a directory that can be written to, got ")
        assert said.endswith(f"{tmp_path / 'root'}: Not a directory")
        assert code == 2


@pytest.mark.parametrize("part", ["root", "dirpath", "save_dir"])
def test_each_read_only_directory_of_a_run_is_named(tmp_path, monkeypatch, part):
    locked = tmp_path / "locked"
    locked.mkdir()
    make = tempfile.mkdtemp

    def refuse(suffix=None, prefix=None, dir=None):
        if dir is not None and Path(dir) == locked:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))
        return make(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    root = locked if part == "root" else tmp_path
    options = {"logger": CSVLogger(locked)} if part == "save_dir" else {}
    saver = ModelCheckpoint(locked / "c" if part == "dirpath" else tmp_path / "c")
    names = {"root": "`default_root_dir`", "dirpath": "`dirpath` of the ModelCheckpoint", "save_dir": "the CSVLogger"}
    with pytest.raises(ConfigurationError, match=rf"{names[part]} must be a directory .*Read-only file system"):
        make_trainer(root, [saver], enable_checkpointing=True, **options).fit(make_module(rounds=1), make_data())
    assert not list(locked.iterdir())


def test_a_root_that_nothing_is_written_to_may_be_read_only(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer(tmp_path / "file" / "x", fast_dev_run=True)
    trainer.fit(make_module(rounds=1), make_data())


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_a_sentence_wherever_it_shows(capsys, number):
    with pytest.raises(SystemExit) as ended, expected.reported():
        raise OSError(number, os.strerror(number), "runs/a.txt")
    assert ended.value.code == 1
    assert f"error: a file could not be written: runs/a.txt ({os.strerror(number)})\n" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), expected.reported():  # may be a fault in a program
        raise FileNotFoundError(errno.ENOENT, "No such file", "a")


DAMAGED_ITEMS = {
    "utf16.jsonl": (b"\xff\xfe{}", "line 1: not UTF-8 text"),
    "second.jsonl": (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8 text"),
    "deep.json": (b"[" * 200_000, "nested too deeply"),
    "deep.jsonl": (b"{}\n" + b"[" * 200_000, "line 2: lists or objects are nested too deeply"),
    "number.json": (b"[" + b"9" * 10_000 + b"]", "not valid JSON"),
    "half.jsonl": (b'{"prompt": "a\\ud800"}', r"line 1: not valid text: \ud800 is half of a pair of surrogates"),
    "no.jsonl.gz": (b"text", "not a whole gzip file"),
    "cut.jsonl.gz": (gzip.compress(b'{"prompt": "a"}\n' * 99)[:-9], "not a whole gzip file"),
    "bytes.jsonl.gz": (gzip.compress(b"\xff"), "not UTF-8 text"),
}


@pytest.mark.parametrize("name", DAMAGED_ITEMS)
def test_damaged_files_of_items_are_named_with_the_line(tmp_path, name):
    content, words = DAMAGED_ITEMS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError) as refused:
        load_items(str(tmp_path / name), "items")
    assert name in str(refused.value)
    assert words in str(refused.value)


def test_a_directory_in_the_place_of_items_and_whole_pairs_of_surrogates(tmp_path):
    (tmp_path / "items.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"items\.json' cannot be read: Is a directory"):
        load_items(str(tmp_path / "items.json"), "items")
    (tmp_path / "emoji.jsonl").write_text(json.dumps({"prompt": "\U0001f600"}))
    assert "\\ud83d" in (tmp_path / "emoji.jsonl").read_text()
    assert load_items(str(tmp_path / "emoji.jsonl"), "items") == [{"prompt": "\U0001f600"}]


def adapter(directory, **config):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | config))
    return directory


def test_an_adapter_that_is_its_own_base_is_refused(tmp_path, monkeypatch):
    adapter(tmp_path / "self", base_model_name_or_path=str(tmp_path / "self"))
    adapter(tmp_path / "a", base_model_name_or_path=str(tmp_path / "b"))
    adapter(tmp_path / "b", base_model_name_or_path=str(tmp_path / "self" / ".." / "a"))
    for name in ("self", "a", "b"):
        with pytest.raises(ConfigurationError, match=r"has no full model below it: .* leads back to an adapter"):
            resolve_source(str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    adapter(tmp_path / "relative", base_model_name_or_path="relative")
    with pytest.raises(ConfigurationError, match="leads back"):
        resolve_source("relative")
    adapter(
        tmp_path / "upper", base_model_name_or_path=str(adapter(tmp_path / "lower", base_model_name_or_path="hub/id"))
    )
    assert resolve_source("upper").base == "hub/id"


@pytest.mark.parametrize("content", ['{"peft', "[1]", "{}", '{"base_model_name_or_path": null}', "[" * 100_000])
def test_an_adapter_without_a_base_is_refused(tmp_path, content):
    adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"adapter_config\.json (must name the adapter's base|is no JSON)"):
        resolve_source(str(tmp_path / "a"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model and an adapter on it."""
    root = tmp_path_factory.mktemp("models")
    tiny_model(0).save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    AgentTeam([str(root / "model")], lora=LoraOptions(r=2)).load().save(root / "export")
    return root


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_text("{}")


DAMAGED_MODELS = [
    ("model", "model.safetensors", cut),
    ("model", "model.safetensors", empty),
    ("model", "config.json", empty),
    ("model", "tokenizer.json", cut),
    ("export/agent_0", "adapter_model.safetensors", cut),
    ("export/agent_0", "adapter_model.safetensors", Path.unlink),
]


@pytest.mark.parametrize(("source", "file", "damage"), DAMAGED_MODELS)
def test_damaged_models_are_named(models, tmp_path, source, file, damage):
    shutil.copytree(models / source, tmp_path / "copy")
    damage(tmp_path / "copy" / file)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path / 'copy'}' (cannot be loaded|has no weights)"):
        AgentTeam([str(tmp_path / "copy")]).load()
    if file != "tokenizer.json":
        with pytest.raises(ConfigurationError, match=r"copy"):
            load_classifier(resolve_source(str(tmp_path / "copy")), "float32")
    if file.startswith("adapter") and damage is cut:
        with pytest.raises(ConfigurationError, match="cannot be loaded"):
            read_adapter(tmp_path / "copy", nn.Module(), "agent_0", {})


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PBRL_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(NotADirectoryError, match="`PBRL_CACHE` must be a directory that can be written to"):
        resolve_source("builtin:tiny")


@pytest.mark.parametrize("kind", ["directory", "below a file"])
def test_an_output_that_cannot_be_written_is_said_before_the_work(tmp_path, capsys, kind):
    (tmp_path / "file").write_text("")
    (tmp_path / "items.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "theirs.yaml").write_text("run: madpo\n")
    target = tmp_path if kind == "directory" else tmp_path / "file" / "x.html"
    words = "`output` must be a file"
    (tmp_path / "runs").mkdir()
    assert words in message_of(capsys, "compare", tmp_path / "runs", "--output", target)[0]
    sample = ["sample", "--team.models", "builtin:tiny", "--team.num_agents=1", "--overwrite=true"]
    assert words in message_of(capsys, *sample, "--items", tmp_path / "items.jsonl", "--output", target)[0]
    if kind != "directory":
        assert words in message_of(capsys, "migrate", tmp_path / "theirs.yaml", "--output", target)[0]
