"""`pbrl migrate` refuses what CoMLRL refuses: every rule, all problems at once, and no key in any message."""

import pytest

from pbrl_lightning.migration.convert import MigrationError, migrate
from test_migrate import API, theirs

WRONG = [
    ("madpo_iter", {"preference_replay_k": 2}, "`preference_replay_k` must be null or 1 with .*current`, got 2"),
    ("madpo_iter", {"preference_replay_lambda": 0.5}, r"`preference_replay_lambda` .*lambda_decay has it\), got 0.5"),
    ("madpo_iter", {"preference_replay_sample_size": 5}, r"`preference_replay_sample_size` .* have it\), got 5"),
    ("madpo_iter", {"preference_replay_mode": "nearest_k"}, "`preference_replay_k` must be an integer >= 1"),
    ("madpo_iter", {"preference_replay_mode": "nearest_k", "preference_replay_k": 0}, "must be an integer >= 1, got 0"),
    ("madpo_iter", {"preference_replay_mode": "all_history", "preference_replay_k": 1}, "only nearest_k has it"),
    ("madpo_iter", {"preference_replay_mode": "lambda_decay"}, "from 0 to 1 .* got null"),
    ("madpo_iter", {"preference_replay_mode": "lambda_decay", "preference_replay_lambda": 1.5}, "and <= 1, got 1.5"),
    ("madpo_iter", {"preference_replay_mode": "newest"}, "one of current, nearest_k, all_history, lambda_decay, got"),
    ("madpo_iter", {"comparator_policy": "best"}, "one of current, current_copy, model, history, api, got 'best'"),
    ("madpo_iter", {"comparator_history_k": 2}, r"`comparator_history_k` .*: current` \(only history has it\), got 2"),
    ("madpo_iter", {"comparator_policy": "history", "comparator_history_k": 0}, ">= 1, got 0"),
    ("madpo_iter", {"comparator_policy": "history", "comparator_model_name": "m"}, "only model has it.*'m'"),
    ("madpo_iter", {"comparator_policy": "model"}, "`comparator_model_name` or `comparator_agents` must be given"),
    ("madpo_iter", {"comparator_policy": "model", "comparator_agents": ["a"] * 3}, "one model per role .2., got 3"),
    ("madpo_iter", {"comparator_policy": "api"}, "`comparator_api_url` must be given"),
    ("madpo_iter", {**API, "comparator_api_format": "openai"}, "`comparator_api_model` must be given for .*'openai'"),
    ("madpo_iter", {**API, "comparator_api_format": "grpc"}, "`madpo_iter.comparator_api_format` must be one of"),
    ("madpo_iter", {"comparator_generation_mode": "centralized", "comparator_centralized_agent_index": 2},
     "from 0 to 1, got 2"),
    ("madpo_iter", {"collaboration_mode": "centralized", "comparator_centralized_agent_index": 1}, "must be 0 with"),
    ("madpo_iter", {"comparator_num_candidates": 0}, ">= 1, got 0"),
    ("madpo_iter", {"num_iterations": 0}, "`madpo_iter.num_iterations` must be an integer >= 1, got 0"),
    ("marlhf_iter", {"preference_scoring_reward": "judge"}, "one of task, reward_model, got 'judge'"),
    ("madpo", {"num_iterations": 2}, r"`num_iterations` must be left out of `madpo` \(only madpo_iter, marlhf_iter"),
    ("madpo", {"pair_selection": "comparator_reward"}, "`pair_selection` must be one of reward_gap, random, all"),
    ("madpo", {"pair_selection": "all"}, r"`preference_pairs_per_sample` must be null .* got 16 \(16 is CoMLRL"),
    ("madpo", {"pair_selection": "widest"}, "`madpo.pair_selection` must be one of .*, got 'widest'"),
    ("madpo", {"preference_num_candidates": 1}, ">= 2, got 1"),
    ("madpo", {"dpo_beta": 0}, "a number > 0, got 0"),
    ("madpo", {"num_turns": 2}, "`num_turns` must be 1 .* got 2"),
    ("madpo", {"joint_mode": "cross"}, "`joint_mode` must be 'aligned', got 'cross'"),
    ("madpo", {"num_agents": 2.5}, "an integer >= 1, got 2.5"),
    ("madpo", {"num_agents": True}, "an integer >= 1, got True"),
    ("madpo", {"parallel_training": "mp"}, "`agent_devices` must be given"),
    ("madpo", {"agent_devices": [0]}, "`agent_devices` must be a device"),
    ("madpo", {"dpo_betta": 1}, "`madpo.dpo_betta` is not an option of CoMLRL; did you mean `dpo_beta`"),
    ("madpo", {"rl_algorithm": "magrpo"}, r"\(only marlhf, marlhf_iter have it\), got 'magrpo'"),
    ("marlhf", {"rl_algorithm": "ppo"}, "one of magrpo, .*, got 'ppo'"),
    ("marlhf", {"num_generations": 1}, "`num_generations` must be >= 2 with `magrpo`, got 1"),
    ("marlhf", {"rl_algorithm": "iac", "critic_type": "q", "num_generations": 1}, ">= 2 with `critic_type: q`, got 1"),
    ("marlhf", {"critic_type": "w"}, "one of v, q, got 'w'"),
    ("marlhf", {"value_clip_range": 0}, "> 0, got 0"),
    ("marlhf", {"advantage_normalization": "yes"}, "must be true or false, got 'yes'"),
    ("marlhf", {"agent_learning_rate": float("nan")}, "a number > 0, got nan"),
    ("marlhf", {"agent_learning_rate": "fast"}, "a number > 0, got 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "options", "message"), WRONG, ids=[f"{r}-{'-'.join(o)}" for r, o, _ in WRONG])
def test_what_comlrl_refuses_is_refused(run, options, message):
    with pytest.raises(MigrationError, match=message) as caught:
        migrate(theirs(run, **options))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent_model": {"name": None}}, "`agent_model.name` or `agents` must name"),
        ({"agents": ["a", "b", "c"], "agent_model": None}, r"one model per agent \(2\), got 3"),
        ({"agents": ["a", "b"]}, "must not name different models"),
        ({"agents": "a"}, "`agents` must be a list of strings"),
        ({"marlhf": {}}, "exactly one section of .*, got `madpo` and `marlhf`"),
        ({"madpo": 3}, "`madpo` must hold options, got 3"),
        ({"magrpo": {}}, "exactly one section of .*, got `madpo` and `magrpo`"),
        ({"MADPO": {}}, "got `madpo` and `madpo`"),
        ({"critics": ["a"], "madpo": None, "iac": {"num_turns": 1}}, "got `madpo` and `iac`"),
        ({"seed": "x"}, "`seed` must be an integer"),
    ],
)
def test_wrong_sections_are_named(change, message):
    with pytest.raises(MigrationError, match=message):
        migrate(theirs("madpo") | change)


@pytest.mark.parametrize("document", [None, [], "madpo", {}, {"agent_model": {"name": "a"}}])
def test_what_is_no_configuration(document):
    with pytest.raises(MigrationError, match=r"must (hold sections|have exactly one section)"):
        migrate(document)


def test_all_problems_are_named_at_once():
    with pytest.raises(MigrationError) as caught:
        migrate(theirs("madpo_iter", dpo_beta=-1, num_turns=2, preference_replay_k=5, comparator_policy="api"))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    "options",
    [
        {**API, "comparator_api_key": "sk-canary"},
        {"comparator_api_key": "sk-canary"},
        {**API, "comparator_api_headers": {"Authorization": "Bearer sk-canary"}},
        {**API, "comparator_api_headers": "Authorization: sk-canary"},
        {**API, "comparator_api_extra_body": {"api_key": "sk-canary"}},
    ],
)
def test_a_key_is_refused_and_never_shown(options):
    with pytest.raises(MigrationError, match=r"key|mapping") as caught:
        migrate(theirs("madpo_iter", **options))
    assert "sk-canary" not in str(caught.value)
    with pytest.raises(MigrationError) as caught:
        migrate(theirs("madpo", **options))
    assert "sk-canary" not in str(caught.value)


def test_a_key_is_named_beside_every_other_problem():
    options = {"comparator_api_key": "sk-canary", "comparator_api_timeout": 0, "dpo_beta": -1, "num_turns": 2}
    options |= {"comparator_policy": "api", "comparator_api_headers": {"X-Api-Key": "sk-canary"}}
    with pytest.raises(MigrationError) as caught:
        migrate(theirs("madpo_iter", **options, preference_num_candidates=[1]) | {"seed": "x", "agents": "y"})
    assert caught.value.problems == [
        "`agents` must be a list of strings, got 'y'",
        "`seed` must be an integer, got 'x'",
        "`comparator_api_key` must not hold a key: put it into an environment variable and name that in "
        "`comparator_api_key_env`",
        "`madpo_iter.preference_num_candidates` must be an integer >= 2, got [1]",
        "`madpo_iter.comparator_api_timeout` must be a number > 0, got 0",
        "`madpo_iter.dpo_beta` must be a number > 0, got -1",
        "`num_turns` must be 1 (runs have one turn), got 2",
        "`comparator_api_url` must be given with `comparator_policy: api`, got null",
        "`comparator_api_headers['X-Api-Key']` must not hold a key: set `comparator_api_key_env` to the name of an "
        "environment variable, or write ${NAME} into a header",
    ]


@pytest.mark.parametrize("document", [{"comparator_api_key": "sk-canary"}, {"madpo": None}])
def test_a_key_is_refused_whatever_the_run(document):
    """Also with two runs, with a run that has no comparator, and with one that CoMLRL would ignore it in."""
    options = {"comparator_api_key": "sk-canary", "comparator_policy": "self"}
    with pytest.raises(MigrationError, match="`comparator_api_key` must not hold a key") as caught:
        migrate(theirs("madpo_iter", **options) | document)
    assert "sk-canary" not in str(caught.value)
    with pytest.raises(MigrationError, match="must not hold a key"):
        migrate(theirs("maac", **options))


IGNORED = [
    ({"comparator_devices": "cpu"}, "comparator_devices", "current"),
    ({"comparator_api_url": "http://a/"}, "comparator_api_url", "current"),
    ({"comparator_centralized_agent_index": 1}, "comparator_centralized_agent_index", "decentralized"),
    ({**API, "comparator_model_name": "m"}, "comparator_model_name", "api"),
]


@pytest.mark.parametrize(("options", "name", "reason"), IGNORED, ids=[name for _, name, _ in IGNORED])
def test_what_comlrl_ignores_is_listed(options, name, reason):
    left = {left.name: left.why for left in migrate(theirs("madpo_iter", **options)).left}
    assert "no effect with" in left[f"madpo_iter.{name}"]
    assert reason in left[f"madpo_iter.{name}"]


ODD = [
    ({"agent_model": "gpt2"}, ["`agent_model` must hold options, got 'gpt2'"]),
    ({"agent_model": ["gpt2"]}, ["`agent_model` must hold options, got ['gpt2']"]),
    ({"agent_model": {"name": ["a", "b"]}}, ["`agent_model.name` must be a string, got ['a', 'b']"]),
    ({"agent_model": {"name": {"path": "a"}}}, ["`agent_model.name` must be a string, got a mapping"]),
    ({"agents": []}, ["`agents` must be a list of strings, got []"]),
    ({"agents": {"0": "a"}}, ["`agents` must be a list of strings, got a mapping"]),
    ({"madpo": ["num_agents"]}, ["`madpo` must hold options, got ['num_agents']"]),
    ({"madpo": "fast"}, ["`madpo` must hold options, got 'fast'"]),
    ({"madpo": {1: 2}}, ["`madpo.1` is not an option of CoMLRL"]),
    ({"madpo": {"pair_selection": ["all"]}}, [
        "`madpo.pair_selection` must be one of reward_gap, random, all, comparator_reward, got ['all']"]),
    ({"madpo": {"num_agents": {"a": 1}}}, ["`madpo.num_agents` must be an integer >= 1, got a mapping"]),
    ({"madpo": {"num_train_epochs": "9" * 400}}, [
        f"`madpo.num_train_epochs` must be an integer >= 1, got '{'9' * 58}…"]),
    ({"madpo": {"agent_devices": {"a": 1}}}, [
        "`agent_devices` must be a device such as cuda:0 or a list of them, got {'a': 1}"]),
    ({"wandb": True}, ["`wandb` must hold options, got True"]),
    ({"wandb": {"tags": "a"}}, ["`wandb.tags` must be a list of strings, got 'a'"]),
    ({"dataset": "trl-lib/tldr"}, ["`dataset` must hold options, got 'trl-lib/tldr'"]),
    ({"dataset": {"name": 3, "train_split": ["a"]}}, [
        "`dataset.name` must be a string, got 3", "`dataset.train_split` must be a string, got ['a']"]),
    ({"reward_processor": {"scale_factor": "big"}}, ["`reward_processor.scale_factor` must be a number, got 'big'"]),
    ({"seed": [1]}, ["`seed` must be an integer, got [1]"]),
    ({"critic_model": 3}, ["`critic_model` must hold options, got 3"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "problems"), ODD, ids=[str(change)[:40] for change, _ in ODD])
def test_odd_values_are_one_sentence_each(change, problems):
    with pytest.raises(MigrationError) as caught:
        migrate(theirs("madpo") | change)
    assert caught.value.problems == problems


def test_all_odd_values_are_named_at_once():
    kept = {section: change[section] for change, _ in ODD for section in change if section != "madpo"}
    with pytest.raises(MigrationError) as caught:
        migrate(theirs("madpo", num_agents=[2], top_p={}) | kept)
    assert len(caught.value.problems) == 10


@pytest.mark.parametrize("content", [3, "x", [1, {"a": 2}], {"a": {"b": 1}}, True, 2.5])
@pytest.mark.parametrize("section", ["env", "critic", 7, None, True])
def test_unknown_sections_of_any_kind_are_listed(section, content):
    done = migrate(theirs("madpo") | {section: content})
    assert [(left.name, left.value) for left in done.left] == [(str(section), content)]


def test_a_wrong_choice_is_not_said_twice():
    with pytest.raises(MigrationError) as caught:
        migrate(theirs("madpo_iter", comparator_policy="best", comparator_history_k=2, preference_replay_mode=3,
                       preference_replay_k=4))  # fmt: skip
    assert len(caught.value.problems) == 2
