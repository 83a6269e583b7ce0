"""`pbrl migrate`: spellings, units, types, defaults and sections that mean something else here than in CoMLRL."""

import functools
import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import WandbLogger

from pbrl_lightning.cli import PreferenceCLI, main
from pbrl_lightning.migration.aliases import canonical
from pbrl_lightning.migration.convert import migrate
from pbrl_lightning.migration.names import MARL
from test_migrate import API, IN_CODE, ROOT, built, theirs

PEER = json.loads((ROOT / "tests/comlrl/settings.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def parser():
    return PreferenceCLI(["--config", str(ROOT / "configs/debug/marlhf.yaml")], run=False).parser


def test_every_spelling_in_comlrls_code_is_taken():
    checked = 0
    for option, spellings in PEER["spellings"].items():
        for spelling, meaning in spellings.items():
            same = {"responses": "openai_responses", "codex": "openai_responses"}  # ours too
            found = canonical(option, spelling)
            assert same.get(found, found) == meaning, (option, spelling)
            assert canonical(option, f" {spelling.upper()} ") == found
            checked += 1
    assert checked == 57


def test_other_spellings_in_a_configuration():
    document = theirs(
        "madpo_iter",
        comparator_policy="previous",
        preference_replay_mode="last_k",
        preference_replay_k=2,
        pair_selection="Comparator_Reward",
        joint_mode="align",
        parallel_training="null",
    )
    data = migrate({"MADPO_iter" if name == "madpo_iter" else name: part for name, part in document.items()}).config[
        "data"
    ]
    assert data["comparator"] == {"class_path": "HistoryComparator", "init_args": {"k": 1}}
    assert data["replay"] == {"class_path": "NearestKReplay", "init_args": {"k": 2}}
    assert data["pair_selection"] == "comparator_reward"
    model = migrate(theirs("marlhf", rl_algorithm="MAGRPO")).config["model"]["init_args"]
    assert model["rl_algorithm"] == "magrpo"
    comparator = migrate(theirs("madpo_iter", **{**API, "comparator_policy": "http", "comparator_api_format": "chat"},
                                comparator_api_model="m")).config["data"]["comparator"]  # fmt: skip
    assert comparator["init_args"]["endpoint"]["format"] == "openai"


@pytest.mark.parametrize(("sections", "source"), [("agent_model", "agent_model.top_k"), ("both", "maac.top_k")])
def test_a_null_top_k_is_transformers_default(sections, source):
    document = theirs("maac", num_turns=1, **({"top_k": None} if sections == "both" else {}))
    document["agent_model"]["top_k"] = 7 if sections == "both" else None
    done = migrate(document)
    assert done.config["data"]["sampling"]["top_k"] == 50
    assert any(remark.startswith(f"`{source}: null` leaves it to transformers") for remark in done.remarks)


def test_the_models_own_files_say_top_k_and_type(tmp_path):
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}', encoding="utf-8")
    document = theirs("marlhf", rl_algorithm="maac")
    document["agent_model"] |= {"name": str(tmp_path), "torch_dtype": "auto"}
    done = migrate(document)
    model = done.config["model"]["init_args"]
    assert done.config["data"]["sampling"]["top_k"] == 20
    types = [model[part]["init_args"]["dtype"] for part in ("team", "reward_model", "critic")]
    assert types == ["bfloat16"] * 3
    assert any("in the type of the checkpoint, bfloat16, which is written out" in remark for remark in done.remarks)
    (tmp_path / "config.json").write_text("no JSON", encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"top_k": true}', encoding="utf-8")
    done = migrate(document)
    assert "dtype" not in done.config["model"]["init_args"]["team"]["init_args"]
    assert done.config["data"]["sampling"]["top_k"] == 50
    assert any("could not be read here: check `model.team.dtype`" in remark for remark in done.remarks)


@pytest.mark.parametrize(
    ("given", "ours"), [("torch.bfloat16", "bfloat16"), ("half", "float16"), ("float32", "float32")]
)
def test_a_given_type_is_that_of_all_models(given, ours):
    document = theirs("marlhf_iter", rl_algorithm="iac", comparator_policy="model", comparator_model_name="m")
    document["agent_model"]["torch_dtype"] = given
    done = migrate(document)
    model = done.config["model"]["init_args"]
    types = [model[part]["init_args"]["dtype"] for part in ("team", "reward_model", "critic")]
    assert [*types, done.config["data"]["comparator"]["init_args"]["dtype"]] == [ours] * 4
    assert not any("torch_dtype" in remark for remark in done.remarks)


@pytest.mark.parametrize(
    ("options", "sizes", "remark"),
    [
        ({}, (1, None), "`rollout_buffer_size: 2` counts responses, 4 per task item: here a rollout has 1 item and an "
         "update 1; an update has 4 responses instead of 2"),
        ({"rollout_buffer_size": 8, "train_batch_size": 4}, (2, 1), "`rollout_buffer_size: 8` and `train_batch_size: "
         "4` count responses, 4 per task item: here a rollout has 2 items and an update 1"),
        ({"rollout_buffer_size": 6}, (2, None), "a rollout has 2 items and an update 2; an update has 8 responses "
         "instead of 6"),
        ({"rollout_buffer_size": 16, "train_batch_size": 6}, (4, 2), "an update 2; an update has 8 responses instead "
         "of 6"),
        ({"rollout_buffer_size": 4, "num_generations": 1}, (4, None), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("algorithm", ["maac", "IAC"])
def test_responses_become_task_items(algorithm, options, sizes, remark, parser):
    done = migrate(theirs("marlhf", rl_algorithm=algorithm, **options), **IN_CODE)
    data = built(parser, done.config)[1]
    assert (data.rollout_batch_size, data.train_batch_size) == sizes
    said = [line for line in done.remarks if "responses" in line]
    assert said == [] if remark is None else remark in said[0]


def test_items_and_updates_of_a_group_algorithm():
    done = migrate(theirs("magrpo", num_turns=1, rollout_buffer_size=4, train_batch_size=2, eval_interval=10,
                          logging_steps=50, num_generations=5))  # fmt: skip
    data, trainer = done.config["data"], done.config["trainer"]
    assert (data["rollout_batch_size"], data["train_batch_size"]) == (4, 2)
    assert trainer["callbacks"] == [{"class_path": "JointEvaluation", "init_args": {"interval": 5}}]
    assert trainer["log_every_n_steps"] == 5
    assert "`eval_interval: 10` counts task items: here 5 updates" in done.remarks
    assert "`logging_steps: 50` counts environment steps, 10 per update: here 5 updates" in done.remarks


@pytest.mark.parametrize("run", MARL)
def test_defaults_that_differ_are_written_out_or_named(run):
    done = migrate({"agent_model": {"name": "m", "dtype": "float32"}, run: {"agent_learning_rate": 1e-4}})
    turns = f"`num_turns` is not given, and CoMLRL's default for `{run}` is 2 (with `early_termination_threshold: -0.2`"
    assert any(remark.startswith(turns) for remark in done.remarks)
    model = done.config["model"]["init_args"]
    assert model["rl_algorithm"] == run
    found = [model.get(name) for name in ("num_train_epochs", "num_generations", "critic_learning_rate")]
    assert found == ([40, 1, 5e-6] if run in ("maac", "iac") else [None, None, None])
    assert done.config["data"].get("rollout_batch_size") == (8 if run in ("maac", "iac") else None)


def test_advantage_mode_is_the_algorithm():
    done = migrate(theirs("magrpo", num_turns=1, advantage_mode="RLOO"))
    assert done.config["model"]["init_args"]["rl_algorithm"] == "marloo"
    assert "`advantage_mode: rloo` makes `magrpo` train as `rl_algorithm: marloo`" in done.remarks
    left = migrate(theirs("marlhf", advantage_mode="raw")).left
    assert [(name, value) for name, value, _ in left] == [("marlhf.advantage_mode", "raw")]


def test_an_attached_critics_rate_is_left_out():
    done = migrate(theirs("marlhf", rl_algorithm="iac", use_separate_critic=False, critic_learning_rate=1e-3))
    assert "critic_learning_rate" not in done.config["model"]["init_args"]
    why = "value heads on the actors train at the actors' rate in CoMLRL as well"
    assert [left.why for left in done.left if left.name == "marlhf.critic_learning_rate"] == [why]


@pytest.mark.parametrize(
    ("run", "sections", "critic"),
    [
        ("maac", {"critic_model": {"name": "c", "torch_dtype": "bfloat16"}}, {"model": "c", "dtype": "bfloat16"}),
        ("maac", {"critics": ["c"]}, {"model": "c"}),
        ("iac", {"critics": ["c", "d"]}, {"models": ["c", "d"]}),
        ("iac", {"critic_model": {"name": "c", "type": "qwen"}}, {"models": "c"}),
    ],
)
def test_critic_models(run, sections, critic):
    done = migrate(theirs(run, num_turns=1) | sections)
    assert done.config["model"]["init_args"]["critic"]["init_args"] == critic


@pytest.mark.parametrize(
    ("dataset", "items", "eval_items"),
    [
        ({"name": "trl-lib/tldr"}, "datasets:trl-lib/tldr", None),
        ({"name": "trl-lib/tldr", "train_split": "train[:9]", "eval_split": "test"}, "datasets:trl-lib/tldr::train[:9]",
         "datasets:trl-lib/tldr::test"),
        ({"name": "data/items.jsonl", "eval_split": "test"}, "data/items.jsonl", None),
    ],
)  # fmt: skip
def test_a_data_set_with_its_splits(dataset, items, eval_items):
    done = migrate(theirs("madpo") | {"dataset": dataset})
    assert (done.config["data"]["items"], done.config["data"].get("eval_items")) == (items, eval_items)
    assert ("dataset.eval_split" in [left.name for left in done.left]) == (items == "data/items.jsonl")
    assert migrate(theirs("madpo") | {"dataset": dataset}, items="mine.jsonl").config["data"]["items"] == "mine.jsonl"


@pytest.mark.parametrize(
    ("section", "logger"),
    [
        ({"project": "p", "entity": "e", "name": "n", "dir": "d", "tags": ["a"], "enabled": True},
         {"init_args": {"save_dir": "d", "project": "p", "name": "n"}, "dict_kwargs": {"entity": "e", "tags": ["a"]}}),
        ({"run_name": "n", "mode": "offline", "id": "7", "resume": "allow"},
         {"init_args": {"save_dir": "runs/madpo", "name": "n", "id": "7", "offline": True},
          "dict_kwargs": {"resume": "allow"}}),
        ({}, {"init_args": {"save_dir": "runs/madpo"}}),
        ({"project": "p", "enabled": False}, None),
        ({"project": "p", "enabled": "off"}, None),
        ({"project": "p", "mode": "disabled"}, None),
        (None, None),
    ],
)  # fmt: skip
def test_weights_and_biases_is_a_logger(section, logger):
    done = migrate(theirs("madpo") | {"wandb": section})
    wanted = None if logger is None else {"class_path": "lightning.pytorch.loggers.WandbLogger", **logger}
    assert done.config["trainer"].get("logger") == wanted
    off = "`wandb` is switched off: TensorBoard's files are written instead"
    assert (off in done.remarks) == (logger is None and section is not None)


def test_the_logger_is_one_that_the_command_line_builds(monkeypatch, tmp_path):
    """W&B itself is not installed here: what reaches it is what the section said."""
    reached = {}

    @functools.wraps(WandbLogger.__init__)
    def reach(self, **options):
        reached.update(options)

    monkeypatch.setattr(WandbLogger, "__init__", reach)
    section = {"project": "p", "entity": "e", "name": "n", "tags": ["a"], "resume": "allow"}
    done = migrate(theirs("madpo") | {"wandb": section}, **IN_CODE)
    monkeypatch.chdir(tmp_path)
    Path("ours.yaml").write_text(yaml.safe_dump(done.config), encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "ours.yaml", "--print_config"])
    assert caught.value.code == 0
    PreferenceCLI(["--config", "ours.yaml", "--trainer.accelerator=cpu"], run=False)
    assert {name: reached[name] for name in (*section, "save_dir")} == {**section, "save_dir": "runs/madpo"}


def test_what_is_switched_off_is_not_listed():
    """CoMLRL's own example files spell out every option."""
    off = {"external_prompt_passthrough": False, "parallel_training": "none", "reference_kl_enabled": False}
    off |= {"reference_kl_coef": 0.1, "log_reward_distribution": False, "early_termination_threshold": None}
    document = theirs("madpo_iter", **off)
    document["agent_model"]["special_tokens"] = {}
    assert migrate(document).left == []
    on = theirs("madpo_iter", reference_kl_enabled=True, reference_kl_coef=0.1, external_prompt_passthrough=True)
    assert [left.name.partition(".")[2] for left in migrate(on).left] == [
        "external_prompt_passthrough", "reference_kl_enabled", "reference_kl_coef"]  # fmt: skip
