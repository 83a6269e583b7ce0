"""A team really learns: from chance to agreement on the coordination task."""

import lightning as L
import pytest

from pbrl_lightning import AgentTeam, CurrentComparator, LoraOptions, MADPOModule, PreferenceDataModule, SamplingConfig
from pbrl_lightning.tasks.coordination import eval_items, same_last_letter, train_items


def success(data, team):
    batch = data.evaluator.evaluate(team, list(range(8)), num_responses=16)
    return batch.rewards.mean().item()


ADAPTED = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]  # a random backbone has little to steer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "learning_rate"),
    [(None, 1e-3), (LoraOptions(r=16, target_modules=ADAPTED), 3e-3)],
    ids=["full", "lora"],
)
def test_iterative_madpo_solves_the_coordination_task(tmp_path, lora, learning_rate):
    # The algorithm and budget of configs/debug/madpo_iter.yaml.
    team = AgentTeam("builtin:tiny", num_agents=2, lora=lora)
    module = MADPOModule(team, num_iterations=10, learning_rate=learning_rate)
    data = PreferenceDataModule(
        train_items(),
        same_last_letter,
        eval_items=eval_items(),
        comparator=CurrentComparator(),
        sampling=SamplingConfig(temperature=1.0, top_p=1.0, top_k=8, max_new_tokens=2),
    )
    before = success(data, team)
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    after = success(data, team)
    assert before < 0.3
    assert after >= 0.9
