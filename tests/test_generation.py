"""`team.generate`, `trainer.predict`, `trainer.test`: the texts of `pbrl sample`, the numbers of `validate`."""

import json

import lightning as L
import pytest
import torch

from pbrl_lightning import (
    AgentTeam,
    JointRewardModel,
    JointRewardModule,
    MADPOModule,
    PreferenceDataModule,
    SamplingConfig,
)
from pbrl_lightning.commands.sample import answers
from pbrl_lightning.tasks.coordination import eval_items, same_last_letter, train_items

SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=3)
ITEMS = eval_items() * 5  # more than one chunk
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def trainer(directory):
    quietly = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", default_root_dir=directory, enable_checkpointing=False, **quietly)


def tiny_team(**options):
    return AgentTeam("builtin:tiny", num_agents=2, formatters=["a {prompt}", "b {prompt}"], **options)


def test_generate_gives_what_the_command_writes():
    team, before = tiny_team(), torch.get_rng_state()
    texts = team.generate(ITEMS, 2, sampling=SAMPLING, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    lines = [json.loads(line) for line in answers(team, ITEMS, num_candidates=2, sampling=SAMPLING, seed=3)]
    assert [response for item in texts for response in item] == [line["completions"] for line in lines]
    assert (len(texts), len(texts[0]), len(texts[0][0])) == (len(ITEMS), 2, 2)
    prompts = [item["prompt"] for item in ITEMS]
    assert team.generate(prompts, 2, temperature=1.0, top_p=1.0, max_new_tokens=3, seed=3) == texts
    assert team.generate(prompts, 2, sampling=SAMPLING, seed=4) != texts
    assert not any(backbone.training for backbone in team.backbones)


def test_a_centralized_team_generates_by_role():
    texts = tiny_team(collaboration="centralized").generate(["x"], sampling=SAMPLING)
    assert [len(response) for response in texts[0]] == [2]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("rain",), {}, r"`items` must be a list of texts or dicts, got str"),
        (([3],), {}, r"`items\[0\]` must be a text or a dict, got int"),
        ((["x"], 0), {}, r"`num_responses` must be >= 1, got 0"),
        ((["x"],), {"temprature": 1.0}, r"`temprature` is not a sampling option .*; did you mean `temperature`\?"),
        ((["x"],), {"top_p": 2.0}, r"`top_p` must be in \(0, 1\]"),
    ],
)
def test_what_generate_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_team().generate(*arguments, **options)


@quiet
def test_predict_and_test_follow_generate_and_validate(tmp_path):
    team = tiny_team()
    module = MADPOModule(team)
    data = PreferenceDataModule(
        items=train_items()[:3], reward_func=same_last_letter, eval_items=ITEMS, sampling=SAMPLING, seed=3
    )
    predicted = trainer(tmp_path).predict(module, data)
    assert [texts for batch in predicted for texts in batch] == team.generate(ITEMS, sampling=SAMPLING, seed=3)
    validated, tested = trainer(tmp_path).validate(module, data), trainer(tmp_path).test(module, data)
    assert validated == tested
    assert validated[0]["eval/n"] == len(ITEMS)
    unevaluated = PreferenceDataModule(items=train_items()[:3], reward_func=same_last_letter, sampling=SAMPLING)
    assert len(trainer(tmp_path).predict(module, unevaluated)[0]) == 3  # the training items
    with pytest.raises(ValueError, match=r"`items` or `eval_items` must be given to predict"):
        trainer(tmp_path).predict(module, PreferenceDataModule())


@quiet
def test_predict_says_what_to_use_instead(tmp_path):
    data = PreferenceDataModule(items=train_items()[:3], reward_func=same_last_letter)
    module = JointRewardModule(JointRewardModel("builtin:tiny"))
    with pytest.raises(ValueError, match=r"a JointRewardModule has no team that could respond"):
        trainer(tmp_path).predict(module, data)
