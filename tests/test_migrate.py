"""`pbrl migrate`: configurations written from the names that CoMLRL documents become configs that `pbrl fit` takes."""

import copy
import inspect
import re
from pathlib import Path

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import WandbLogger

import pbrl_lightning as ours
from fake_api import FakeApi
from pbrl_lightning.callbacks import ComparatorHistory, JointEvaluation, RewardDistribution
from pbrl_lightning.cli import PreferenceCLI, main
from pbrl_lightning.comparators.api import ApiComparator
from pbrl_lightning.migration.convert import migrate
from pbrl_lightning.migration.names import COMPARATORS, MARL, NAMES, PARTS, REPLAYS, ROUNDS, RUNS, names_table
from pbrl_lightning.preferences.processors import ScaleAndShift
from pbrl_lightning.remote import ApiEndpoint

ROOT = Path(__file__).parent.parent
TASK = "pbrl_lightning.tasks.coordination"
IN_CODE = {
    "items": f"{TASK}.train_items",
    "eval_items": f"{TASK}.eval_items",
    "reward_func": f"{TASK}.same_last_letter",
    "formatters": ["a {prompt}", "b {prompt}"],
}
API = {"comparator_policy": "api", "comparator_api_url": "http://127.0.0.1:1/generate"}
# Every option that CoMLRL's page about preference-based training names.
DOCUMENTED = """
    num_turns joint_mode num_iterations num_train_epochs num_agents preference_num_candidates pair_selection
    preference_pairs_per_sample preference_scoring_reward preference_replay_dir preference_replay_mode
    preference_replay_k preference_replay_lambda preference_replay_sample_size comparator_policy
    comparator_devices comparator_model_name comparator_agents comparator_history_k comparator_generation_mode
    comparator_centralized_agent_index comparator_api_format comparator_api_url comparator_api_model
    comparator_api_key_env comparator_api_response_field rl_algorithm reference_kl_enabled reference_kl_coef
    reference_devices reward_model_name dpo_beta
"""
COMPARATOR_OPTIONS = {
    "current": {},
    "current_copy": {"comparator_devices": "cpu"},
    "model": {"comparator_model_name": "builtin:tiny", "comparator_devices": ["cpu"]},
    "history": {"comparator_history_k": 2},
    "api": {"comparator_api_url": "http://127.0.0.1:1/generate"},
}
REPLAY_OPTIONS = {
    "current": {"preference_replay_k": 1},
    "nearest_k": {"preference_replay_k": 3, "preference_replay_sample_size": 5},
    "all_history": {"preference_replay_sample_size": 6},
    "lambda_decay": {"preference_replay_lambda": 0.8, "preference_replay_sample_size": 256},
}


def theirs(run, **options):
    """A CoMLRL configuration of the tiny team."""
    small = {"max_new_tokens": 3, **({} if run in MARL else {"preference_num_candidates": 4})}
    return {
        "agent_model": {"name": "builtin:tiny", "temperature": 0.7, "top_p": 0.9, "top_k": None},
        "agents": None,
        "seed": 3,
        run: {**small, **options},
    }


@pytest.fixture(scope="module")
def parser():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return PreferenceCLI(["--config", "configs/debug/madpo_iter.yaml"], run=False).parser


def built(parser, config):
    """What the real parser makes of a config, the Trainer left out: the module and the data module."""
    made = parser.instantiate_classes(parser.parse_object(copy.deepcopy(config)))
    return made.model, made.data


@pytest.mark.parametrize("run", RUNS)
def test_every_run_is_one_of_ours(run, parser):
    module, data = built(parser, migrate(theirs(run, num_train_epochs=3), **IN_CODE).config)
    assert type(module).__name__ == RUNS[run]
    assert data.iterative == (run in ROUNDS)
    assert (module.num_train_epochs, data.seed) == (3, 3)
    assert data.num_candidates == (80 if run in MARL else 4)
    assert (data.sampling.temperature, data.sampling.top_p, data.sampling.top_k) == (0.7, 0.9, 50)
    assert data.sampling.max_new_tokens == 3
    assert len(data.items) > 2
    assert module.team.num_agents == 2


@pytest.mark.parametrize("policy", COMPARATORS)
def test_every_comparator(policy, parser):
    options = {"comparator_policy": policy, "comparator_num_candidates": 3, **COMPARATOR_OPTIONS[policy]}
    _, data = built(parser, migrate(theirs("madpo_iter", **options), **IN_CODE).config)
    assert type(data.comparator).__name__ == COMPARATORS[policy]
    assert data.comparator.num_candidates == 3
    found = {name: getattr(data.comparator, name, None) for name in ("k", "models", "devices")}
    devices = None if policy in ("current", "history", "api") else ["cpu"]
    assert found == {
        "k": 2 if policy == "history" else None,
        "models": "builtin:tiny" if policy == "model" else None,
        "devices": devices,
    }


def test_a_centralized_comparator_and_a_centralized_team(parser):
    options = {"comparator_generation_mode": "centralized", "comparator_centralized_agent_index": 1}
    _, data = built(parser, migrate(theirs("madpo_iter", **options), **IN_CODE).config)
    assert data.comparator.centralized.agent_index == 1
    options = {"collaboration_mode": "centralized", "comparator_generation_mode": "centralized"}
    module, data = built(parser, migrate(theirs("marlhf_iter", **options), **IN_CODE).config)
    assert data.comparator.centralized is None
    assert (module.team.num_agents, len(module.team.roles)) == (1, 2)
    data.comparator.check(module.team)


@pytest.mark.parametrize("mode", REPLAYS)
def test_every_replay(mode, parser):
    config = migrate(theirs("madpo_iter", preference_replay_mode=mode, **REPLAY_OPTIONS[mode]), **IN_CODE).config
    replay = built(parser, config)[1].replay
    assert type(replay).__name__ == REPLAYS[mode]
    assert replay.sample_size == REPLAY_OPTIONS[mode].get("preference_replay_sample_size")
    assert getattr(replay, "k", None) == (3 if mode == "nearest_k" else None)
    assert getattr(replay, "decay", None) == (0.8 if mode == "lambda_decay" else None)


@pytest.mark.parametrize("algorithm", ["magrpo", "mareinforce", "marloo", "maremax", "maac", "iac"])
def test_every_algorithm(algorithm, parser):
    given = {"rl_algorithm": algorithm, "num_generations": 3, "value_loss_coef": 0.5, "critic_type": "q"}
    module, _ = built(parser, migrate(theirs("marlhf", **given), **IN_CODE).config)
    assert (module.policy.rl_algorithm, module.policy.num_generations) == (algorithm, 3)
    critic = {"maac": "JointCritic", "iac": "SeparateCritics"}.get(algorithm)
    assert (type(module.critic).__name__ if module.critic is not None else None) == critic
    if critic is not None:
        assert (module.critic.critic_type, module.policy.value_loss_coef) == ("q", 0.5)


def test_value_heads_a_reference_and_a_reward_model(parser):
    options = {
        "rl_algorithm": "iac",
        "use_separate_critic": False,
        "value_clip_range": None,
        "reference_kl_enabled": True,
        "reference_kl_coef": 0.05,
        "reference_devices": "cpu",
        "reward_model_name": "builtin:tiny",
        "reward_max_length": 64,
        "reward_freeze_backbone": True,
        "reward_learning_rate": "1e-5",  # a string to YAML
        "reward_num_train_epochs": 3,
        "reward_train_batch_size": 4,
        "rollout_buffer_size": 32,
        "train_batch_size": 16,
        "advantage_normalization": False,
        "preference_scoring_reward": "reward_model",
    }
    module, data = built(parser, migrate(theirs("marlhf_iter", **options), **IN_CODE).config)
    assert type(module.critic).__name__ == "AttachedCritics"
    assert module.critic.value_clip_range is None
    assert (module.policy.reference_kl.coef, module.policy.reference_kl.devices) == (0.05, ["cpu"])
    assert (module.reward.num_train_epochs, module.reward.learning_rate) == (3, 1e-5)
    assert module.policy.advantage_normalization is False
    assert (data.batch_size, data.rollout_batch_size, data.train_batch_size) == (4, 8, 4)
    assert data.preference_scoring_reward == "reward_model"


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, None), ({"rollout_buffer_size": 6}, 6), ({"rollout_buffer_size": 6, "train_batch_size": 3}, 3)],
)
def test_madpos_batch_is_in_pairs(options, size, parser):
    assert built(parser, migrate(theirs("madpo", **options), **IN_CODE).config)[1].batch_size == size


def test_other_sections(parser):
    document = theirs("madpo", preference_pairs_per_sample=None, pair_selection="all", agent_devices=["cuda:1"])
    document["agent_model"]["top_k"] = 9
    document |= {
        "agents": ["builtin:tiny", "builtin:tiny"],
        "reward_processor": {"enabled": True, "scale_factor": 4.0, "shift": -1.0},
        "output": {"base_dir": "out"},
    }
    document["agent_model"]["torch_dtype"] = "torch.bfloat16"
    document["madpo"] |= {"logging_steps": 28, "eval_interval": 0, "eval_num_samples": 3}
    done = migrate(document, **IN_CODE)
    module, data = built(parser, done.config)
    assert data.pairs_per_sample is None
    assert data.oracle.reward_processor(2.0) == 7.0
    assert module.team._settings.models == ["builtin:tiny", "builtin:tiny"]
    assert module.team._settings.dtype == "bfloat16"
    evaluation = {"class_path": "JointEvaluation", "init_args": {"interval": 0, "num_samples": 3}}
    where = {"default_root_dir": "out", "accelerator": "gpu", "devices": [1]}
    assert done.config["trainer"] == {**where, "log_every_n_steps": 7, "callbacks": [evaluation]}
    assert (done.left, done.to_do) == ([], {})
    assert done.remarks == ["`logging_steps: 28` counts environment steps, 4 per update: here 7 updates"]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_reward_distribution_is_a_callback(parser, wanted):
    done = migrate(theirs("madpo_iter", log_reward_distribution=wanted), **IN_CODE)
    built(parser, done.config)
    assert done.config["trainer"].get("callbacks", []) == [{"class_path": "RewardDistribution"}] * wanted
    assert done.left == []


def test_every_option_of_an_endpoint(parser):
    form = "codex"
    options = {
        **API,
        "comparator_api_format": form,
        "comparator_api_model": "any",
        "comparator_api_key_env": "MY_KEY",
        "comparator_api_max_n_per_request": 2,
        "comparator_api_timeout": 9,
        "comparator_api_headers": {"X-Team": "${USER}"},
        "comparator_api_response_field": "data.texts",
        "comparator_api_extra_body": {"seed": 7},
    }
    comparator = built(parser, migrate(theirs("madpo_iter", **options), **IN_CODE).config)[1].comparator
    assert isinstance(comparator, ApiComparator)
    endpoint = comparator.endpoint
    assert (endpoint.format, endpoint.model, endpoint.key_env, endpoint.timeout) == (form, "any", "MY_KEY", 9.0)
    assert (endpoint.max_n_per_request, endpoint.headers) == (2, {"X-Team": "${USER}"})
    assert (endpoint.response_field, endpoint.extra_body) == ("data.texts", {"seed": 7})


@pytest.mark.parametrize(
    ("form", "header", "prefix", "sent"),
    [
        ("generic", "Authorization", "Bearer", {"Authorization": "Bearer k"}),
        ("generic", "X-Key", "", {"X-Key": "k"}),
        ("openai", "Authorization", "Token", {"Authorization": "Token k"}),
        ("generic", "Authorization", "", {"Authorization": "k"}),
        ("anthropic", "Authorization", "Bearer", {"x-api-key": "k", "anthropic-version": "2023-06-01"}),
    ],
)
def test_how_a_key_is_sent(form, header, prefix, sent, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k")
    options = {"comparator_api_key_header": header, "comparator_api_key_prefix": prefix, "comparator_api_model": "any"}
    options |= {**API, "comparator_api_format": form, "comparator_api_key_env": "MY_KEY"}
    comparator = migrate(theirs("madpo_iter", **options)).config["data"]["comparator"]
    assert ApiEndpoint(**comparator["init_args"]["endpoint"]).request_headers() == sent


def test_what_has_no_counterpart_is_listed_with_its_value_and_what_to_do():
    document = theirs(
        "madpo_iter", discount=1.0, eval_batch_size=2, reference_kl_enabled=True, agent_devices=["a:0", "b"]
    )
    document |= {"bfcl": {"role_mode": "x"}, "tokenizer": {"padding_side": "left"}, "datasets": [1]}
    document["agent_model"] |= {"type": "qwen", "new_option": 1}
    done = migrate(document)
    assert {left.name: left.value for left in done.left} == {
        "agent_model.type": "qwen",
        "agent_model.new_option": 1,
        "madpo_iter.discount": 1.0,
        "madpo_iter.eval_batch_size": 2,
        "madpo_iter.reference_kl_enabled": True,
        "madpo_iter.agent_devices": ["a:0", "b"],
        "bfcl": {"role_mode": "x"},
        "datasets": [1],
        "tokenizer.padding_side": "left",
    }
    assert all(left.why for left in done.left)
    assert {left.name: left.why for left in done.left}["datasets"] == "unknown section; did you mean `dataset`?"
    assert set(done.to_do) == {"data.items", "data.reward_func", "data.eval_items", "model.team.formatters"}


def test_nothing_that_is_given_gets_lost():
    """Every option with a value shows in the config or in the list."""
    values = {"integer": 3, "number": 0.5, "boolean": True, "string": "x", "mapping": {"a": "b"}, "strings": ["x", "x"]}
    silent = {"num_turns", "joint_mode", "comparator_api_key", "parallel_training"}
    for name in (name for name in NAMES if name.section == "run" and name.name not in silent):
        run = "marlhf_iter" if "marlhf_iter" in name.runs else name.runs[0]
        value = name.limits.choices[-1] if name.limits.choices else values.get(name.limits.kind, "cpu")
        options = {name.name: value, **needed(name.name)}
        document = theirs(run, **options)
        done = migrate(document)
        del document[run][name.name]
        rest = {key: option for key, option in document[run].items() if key not in options}
        before = migrate({**document, run: rest})
        assert (done.config, done.left, done.remarks) != (before.config, before.left, before.remarks), name.name


def needed(name):
    """Options that must stand beside one."""
    if name.startswith("comparator_api_"):
        return {**API, "comparator_api_model": "m", "comparator_api_key_env": "K"} | (
            {"comparator_api_url": "http://127.0.0.1:2/"} if name == "comparator_api_url" else {}
        ) if name not in ("comparator_api_model", "comparator_api_key_env") else {
            **API, "comparator_api_model" if name.endswith("key_env") else "comparator_api_key_env": "x"}  # fmt: skip
    return {
        "comparator_policy": COMPARATOR_OPTIONS["api"],
        "preference_replay_mode": REPLAY_OPTIONS["lambda_decay"],
        "preference_replay_k": {"preference_replay_mode": "nearest_k"},
        "preference_replay_lambda": {"preference_replay_mode": "lambda_decay"},
        "preference_replay_sample_size": {"preference_replay_mode": "all_history"},
        "comparator_model_name": {"comparator_policy": "model"},
        "comparator_agents": {"comparator_policy": "model"},
        "comparator_devices": {"comparator_policy": "history"},
        "comparator_history_k": {"comparator_policy": "history"},
        "comparator_centralized_agent_index": {"comparator_generation_mode": "centralized", "num_agents": 4},
        "train_batch_size": {"rollout_buffer_size": 8},
    }.get(name, {})


def test_the_table_names_all_that_is_documented_and_only_options_that_exist():
    names = {name.name for name in NAMES if name.section == "run"}
    assert set(DOCUMENTED.split()) <= names
    assert len(names) == sum(name.section == "run" for name in NAMES)  # each once
    classes = {
        "team": [ours.AgentTeam], "data": [ours.PreferenceDataModule], "sampling": [ours.SamplingConfig],
        "model": [ours.MADPOModule, ours.MARLHFModule], "reward_model": [ours.JointRewardModel],
        "critic": [ours.AttachedCritics, ours.SeparateCritics], "reference_kl": [ours.ReferenceKL],
        "reward_processor": [ScaleAndShift], "centralized": [ours.CentralizedGeneration],
        "endpoint": [ours.ApiEndpoint],
        "comparator": [getattr(ours, name) for name in COMPARATORS.values()], "trainer": [L.Trainer],
        "logger": [WandbLogger],
        "replay": [getattr(ours, name) for name in REPLAYS.values()],
        "evaluation": [JointEvaluation], "history": [ComparatorHistory], "distribution": [RewardDistribution],
    }  # fmt: skip
    assert set(classes) == set(PARTS)
    for name in NAMES:
        if name.ours is not None:
            part, _, option = name.ours.partition(".")
            known = {option for kind in classes[part] for option in inspect.signature(kind).parameters}
            assert not option or option in known, name
        assert name.ours or name.note, f"{name.name} has no counterpart, and nothing is said of it"


def test_the_documentation_holds_the_table():
    page = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    assert names_table() in page
    before, after = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert migrate(before).config == after


def test_the_command_writes_a_config_with_a_list_of_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    document = theirs("madpo", discount=1.0) | {"openai": {"api_key": "sk-canary"}, "wandb": {"api_key": "sk-canary"}}
    document |= {"dataset": {"hub_token": "sk-canary"}, "tokenizer": {"padding_side": "left"}}
    Path("theirs.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    options = [
        "--items",
        IN_CODE["items"],
        "--reward_func",
        IN_CODE["reward_func"],
        "--formatters",
        *IN_CODE["formatters"],
    ]
    main(["migrate", "theirs.yaml", *options])
    printed = capsys.readouterr().out
    main(["migrate", "theirs.yaml", *options, "--output", "ours.yaml"])
    written = Path("ours.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(printed) == yaml.safe_load(written)
    said = capsys.readouterr().err
    for text in (printed, written, said):
        assert "madpo.discount = 1.0: no effect: runs here have one turn" in text
        assert "data.eval_items: held-out" in text
        assert "tokenizer.padding_side = left: no result depends on it" in text
        assert "sk-canary" not in text
    with pytest.raises(SystemExit, match=r"ours\.yaml"):  # nothing is overwritten
        main(["migrate", "theirs.yaml", "--output", "ours.yaml"])
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "ours.yaml", "--print_config"])
    assert caught.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["num_candidates"] == 4


def test_what_the_command_says_of_wrong_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("madpo: {num_turns: 2, dpo_beta: 0}\n", encoding="utf-8")
    Path("b.yaml").write_text("madpo: [", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"a\.yaml cannot be converted:\n  - .*dpo_beta.*\n  - .*\n  - `num_turns`"):
        main(["migrate", "a.yaml"])
    with pytest.raises(SystemExit, match=r"b\.yaml is not valid YAML"):
        main(["migrate", "b.yaml"])
    with pytest.raises(SystemExit, match=r"'c\.yaml' does not exist"):
        main(["migrate", "c.yaml"])
    with pytest.raises(SystemExit, match="`source` must name"):
        main(["migrate"])
    main(["migrate", "--names"])
    assert capsys.readouterr().out == names_table() + "\n"


RUNNING = [
    ("madpo", {"num_train_epochs": 1}),
    *(("madpo_iter", {"comparator_policy": policy, **more}) for policy, more in COMPARATOR_OPTIONS.items()),
    *(("madpo_iter", {"preference_replay_mode": mode, **more}) for mode, more in REPLAY_OPTIONS.items()),
    *(("marlhf", {"rl_algorithm": name}) for name in ("magrpo", "mareinforce", "marloo", "maremax", "maac", "iac")),
    ("marlhf", {"rl_algorithm": "iac", "use_separate_critic": False, "reference_kl_enabled": True}),
    ("marlhf_iter", {"comparator_policy": "history", "preference_scoring_reward": "reward_model"}),
    ("marlhf_iter", {"comparator_generation_mode": "centralized"}),
    *((run, {"num_turns": 1, "num_generations": 2}) for run in MARL),
    ("magrpo", {"num_turns": 1, "collaboration_mode": "centralized"}),
    *(("marlhf_iter", {"comparator_policy": policy, **more}) for policy, more in COMPARATOR_OPTIONS.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "options"), RUNNING, ids=[f"{r}-{'-'.join(map(str, o.values()))}" for r, o in RUNNING])
def test_a_converted_configuration_runs(run, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = theirs(run, **options) | {"reward_processor": {"enabled": True, "scale_factor": 2.0, "shift": 1.0}}
    given = [f"--{name}={value}" for name, value in IN_CODE.items() if name != "formatters"]
    with FakeApi() as api:
        if "comparator_api_url" in options:
            document[run]["comparator_api_url"] = api.url_of("generic")
        Path("theirs.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        main(["migrate", "theirs.yaml", *given, "--formatters", *IN_CODE["formatters"], "--output", "ours.yaml"])
        main(["fit", "--config", "ours.yaml", "--trainer.accelerator=cpu", "--trainer.fast_dev_run=true"])
