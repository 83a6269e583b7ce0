"""The command line: every shipped YAML, saved configs, validation, a user's own reward."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fake_api import FakeApi
from pbrl_lightning.cli import main

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "trainer")
TINY = [
    "--model.init_args.team.init_args.models=builtin:tiny",
    "--model.init_args.team.init_args.formatters={prompt}",
    "--data.num_candidates=4",
    "--data.sampling.max_new_tokens=4",
]


def tiny_options(config):
    """What puts the tiny models in the place of a config's own."""
    if "JointRewardModule" in config.read_text(encoding="utf-8"):
        return ["--model.init_args.reward_model.init_args.model=builtin:tiny"]
    if "SentenceAdapter" in config.read_text(encoding="utf-8"):  # it writes chat messages
        return [
            *TINY,
            "--model.init_args.team.init_args.joint_adapter=pbrl_lightning.tasks.coordination.CharacterAdapter",
        ]
    if "tasks.expansion" in config.read_text(encoding="utf-8"):  # its items have another field
        return [*TINY, "--model.init_args.team.init_args.formatters={abstract_text}"]
    return TINY


def test_there_are_configs():
    assert len(CONFIGS) >= 32


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_config_goes_through_the_cli(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none of anyone's")
    options = [*tiny_options(config), "--trainer.accelerator=cpu", "--trainer.fast_dev_run=true"]
    with FakeApi() as api:
        if "ApiComparator" in config.read_text(encoding="utf-8"):
            endpoint = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]["comparator"]["init_args"]["endpoint"]
            url = api.url_of(endpoint.get("format", "generic"))
            options.append(f"--data.comparator.init_args.endpoint.url={url}")
        main(["fit", "--config", str(config), *options])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marlhf", "marlhf_iter"])
def test_both_phases_of_a_config_run_and_export(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ROOT / f"configs/{name}.yaml"
    main(["fit", "--config", str(config), *TINY, "--trainer.accelerator=cpu", "--trainer.limit_train_batches=1"])
    (events,) = Path("runs").rglob("events.out.tfevents*")
    logged = events.read_bytes()
    assert b"reward/loss" in logged
    assert b"policy/loss" in logged
    exported = {path.name for path in next(Path("runs").rglob("export")).iterdir()}
    assert exported == {"agent_0", "agent_1", "reward_model"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_configs_are_short_and_say_how_to_run_them(config):
    text = config.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 45
    assert f"pbrl fit --config {config.relative_to(ROOT)}" in text


def run_files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.slow
def test_fault_B81_the_saved_config_reproduces_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--model.init_args.num_iterations=2", "--data.num_candidates=4"]
    main(["fit", "--config", str(ROOT / "configs/debug/madpo_iter.yaml"), *short, "--trainer.default_root_dir=one"])
    first = next(Path("one").rglob("config.yaml")).parent
    main(["fit", "--config", str(first / "config.yaml"), "--trainer.default_root_dir=two"])
    second = next(Path("two").rglob("config.yaml")).parent
    for name in ("replay/iteration_0001.json", "replay/iteration_0002.json", "export/agent_0/model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.slow
def test_fault_B81_a_config_of_lists_adapters_and_callbacks_goes_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [
        "--config", str(ROOT / "configs/debug/madpo_iter.yaml"),
        "--model.init_args.num_iterations=1",
        "--model.init_args.team.init_args.models=[builtin:tiny, builtin:tiny]",
        "--model.init_args.team.init_args.formatters=['{prompt}', 'Say {prompt}']",
        "--model.init_args.team.init_args.lora={r: 2, alpha: 4}",
        "--model.init_args.lr_scheduler={class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 3}}",
        "--data.comparator={class_path: HistoryComparator, init_args: {k: 1}}",
        "--data.replay={class_path: LambdaDecayReplay, init_args: {decay: 0.5}}",
        "--data.num_candidates=4",
        "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: one}}",
        "--trainer.callbacks+={class_path: JointEvaluation, init_args: {interval: 5, num_samples: 2}}",
    ]  # fmt: skip
    main(["fit", *options])
    first = next(Path("one").rglob("config.yaml"))
    saved = yaml.safe_load(first.read_text(encoding="utf-8"))
    assert saved["data"]["reward_func"] == "pbrl_lightning.tasks.coordination.same_last_letter"
    assert saved["model"]["init_args"]["team"]["init_args"]["models"] == ["builtin:tiny", "builtin:tiny"]
    kept = first.rename(tmp_path / "saved.yaml")
    shutil.move("one", "before")
    main(["fit", "--config", str(kept)])
    second = next(Path("one").rglob("config.yaml"))
    assert second.read_bytes() == kept.read_bytes()
    for name in ("replay/iteration_0001.json", "export/agent_1/adapter_model.safetensors"):
        (one,), (two,) = Path("before").rglob(name), Path("one").rglob(name)
        assert one.read_bytes() == two.read_bytes(), name


@pytest.mark.slow
def test_fault_B82_fit_validate_and_resume_in_one_directory_lose_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [
        "--config", str(ROOT / "configs/debug/madpo_iter.yaml"),
        "--data.num_candidates=4",
        "--trainer.logger={class_path: TensorBoardLogger, init_args: {save_dir: ., name: run, version: one}}",
    ]  # fmt: skip
    main(["fit", *options, "--model.init_args.num_iterations=2", "--trainer.max_epochs=1"])
    first = Path("run/one/config.yaml").read_text(encoding="utf-8")
    main(["validate", *options])
    assert Path("run/one/config.yaml").read_text(encoding="utf-8") == first
    assert Path("run/one/config_validate.yaml").exists()
    (checkpoint,) = Path("run/one").rglob("epoch=*.ckpt")
    main(["fit", *options, "--model.init_args.num_iterations=2", f"--ckpt_path={checkpoint}"])
    configs = {path.name: path.read_text(encoding="utf-8") for path in Path("run/one").glob("config*.yaml")}
    assert first in configs.values()
    assert any(str(checkpoint) in text for text in configs.values())
    assert yaml.safe_load(configs["config.yaml"])["ckpt_path"] == str(checkpoint)
    assert (tmp_path / "run/one/replay/iteration_0002.json").exists()


@pytest.mark.slow
def test_a_reward_of_the_users_own_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def score(*completions, prompts, batch_items):\n"
        "    return [len(a) + item['bonus'] for a, item in zip(completions[0], batch_items)]\n",
        encoding="utf-8",
    )
    (tmp_path / "items.jsonl").write_text(
        '{"prompt": "a", "bonus": 1}\n{"prompt": "b", "bonus": 2}\n', encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    config = str(ROOT / "configs/debug/madpo_iter.yaml")
    command = [sys.executable, "-m", "pbrl_lightning", "fit", "--config", config, "--trainer.fast_dev_run=true"]
    command += ["--data.items=items.jsonl", "--data.eval_items=items.jsonl", "--data.reward_func=my_rewards:score"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_validate_scores_saved_agents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/debug/madpo_iter.yaml")
    main(["fit", "--config", config, "--model.init_args.num_iterations=1", "--trainer.default_root_dir=one"])
    export = next(Path("one").rglob("export"))
    capsys.readouterr()
    main(
        [
            "validate",
            "--config",
            config,
            f"--model.init_args.team.init_args.models={export}",
            "--trainer.default_root_dir=two",
        ]
    )
    printed = capsys.readouterr().out
    for name in ("eval/turn_1/reward_mean", "eval/turn_1/reward_standard_error", "eval/n"):
        assert name in printed


def test_problems_are_named_together_and_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/debug/madpo.yaml")
    missing = "--model.init_args.team.init_args.models=./there_is_no_such_model"
    with pytest.raises(SystemExit, match="`num_iterations` is 3, but a run is iterative only with a `comparator`"):
        main(["fit", "--config", config, missing, "--model.init_args.num_iterations=3"])
    with pytest.raises(SystemExit, match=r"`batch_size` must be >= 1.*`num_turns` must be 1"):
        main(["fit", "--config", config, missing, "--data.batch_size=0", "--data.num_turns=2"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.sampling.max_new_tokens=0", "max_new_tokens"),
        ("--data.sampling.top_p=0", "top_p"),
        ("--data.no_such_option=1", "no_such_option"),
        ("--data.comparator=NoSuchComparator", "NoSuchComparator"),
    ],
)
def test_bad_options_are_named(option, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError)) as raised:
        main(["fit", "--config", str(ROOT / "configs/debug/madpo_iter.yaml"), option])
    assert message in capsys.readouterr().err + str(raised.value)


def test_help_is_useful(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "preferences between their joint responses" in printed
    assert "fit" in printed
    assert "configs/quickstart.yaml" in printed


@pytest.mark.slow
def test_fault_B81_saved_configs_hold_class_paths_not_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", str(ROOT / "configs/madpo_iter.yaml"), *TINY, "--model.init_args.num_iterations=1"])
    saved = yaml.safe_load(next(Path("runs").rglob("config.yaml")).read_text(encoding="utf-8"))
    assert saved["data"]["comparator"]["class_path"] == "pbrl_lightning.HistoryComparator"
    assert saved["data"]["reward_func"] == "pbrl_lightning.tasks.writing.writing_reward"
    assert "object at 0x" not in str(saved)


@pytest.mark.parametrize(
    "option",
    ["headers={Authorization: Bearer sk-canary}", "url=http://127.0.0.1:1/?api_key=sk-canary", "key_env=sk-canary"],
)
def test_a_key_given_literally_is_refused_and_not_shown(option, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/debug/madpo_iter_api.yaml")
    with pytest.raises(SystemExit, match="a key") as caught:
        main(["fit", "--config", config, f"--data.comparator.init_args.endpoint.{option}"])
    shown = "".join(capfd.readouterr()) + str(caught.value)
    assert "sk-canary" not in shown
    assert not list(tmp_path.rglob("config.yaml"))
