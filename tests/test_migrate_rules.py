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
    ("madpo_iter", {"comparator_api_url": "http://a/"}, r"`comparator_api_url` .* \(only api has it\)"),
    ("madpo_iter", {**API, "comparator_api_format": "openai"}, "`model` must be given for the format 'openai'"),
    ("madpo_iter", {**API, "comparator_api_format": "grpc"}, "`madpo_iter.comparator_api_format` must be one of"),
    ("madpo_iter", {"comparator_devices": "cpu"}, "only current_copy, model, history has it"),
    ("madpo_iter", {"comparator_centralized_agent_index": 1}, "left out with decentralized generation, got 1"),
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
    ("madpo", {"dpo_betta": 1}, "`madpo.dpo_betta` is not an option .* did you mean `dpo_beta`"),
    ("madpo", {"rl_algorithm": "magrpo"}, r"\(only marlhf, marlhf_iter have it\), got 'magrpo'"),
    ("marlhf", {"rl_algorithm": "ppo"}, "one of magrpo, .*, got 'ppo'"),
    ("marlhf", {"num_generations": 1}, "`num_generations` must be >= 2 with `rl_algorithm: magrpo`, got 1"),
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
        ({"agents": "a"}, "`agents` must be a list of texts"),
        ({"marlhf": {}}, "exactly one section of .*, got `madpo` and `marlhf`"),
        ({"madpo": 3}, "`madpo` must hold options, got 3"),
        ({"magrpo": {}}, "configs/marl_magrpo.yaml"),
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
