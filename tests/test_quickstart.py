"""The quickstart on the real model, with a small budget: what it prints, writes and exports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORD = {
    "prompts",
    "winner_completions",
    "loser_completions",
    "winner_reward",
    "loser_reward",
    "candidate_reward_mean",
    "raw_rewards",
    "target_raw_reward",
    "comparator_raw_reward",
}
SPEAK = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Say hello."}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
out = model.generate(**ids, max_new_tokens=8, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True))
"""


@pytest.mark.slow
def test_quickstart_with_a_small_budget(tmp_path):
    command = [sys.executable, "-m", "pbrl_lightning", "fit", "--config", str(ROOT / "configs/quickstart.yaml")]
    command += ["--model.init_args.num_iterations=1", "--data.num_candidates=2", "--data.pairs_per_sample=1"]
    command += ["--data.sampling.max_new_tokens=12", "--trainer.default_root_dir=out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    for expected in ("evaluation after", "tensorboard --logdir", "trained models:"):
        assert expected in printed

    (run,) = (tmp_path / "out" / "lightning_logs").iterdir()
    assert list(run.glob("events.out.tfevents*"))
    content = json.loads((run / "replay" / "iteration_0001.json").read_text(encoding="utf-8"))
    assert content.keys() == {"iteration", "num_pairs", "pairs"}
    assert content["num_pairs"] == len(content["pairs"]) > 0
    for pair in content["pairs"]:
        assert pair.keys() == RECORD
        assert len(pair["prompts"]) == len(pair["winner_completions"]) == len(pair["loser_completions"]) == 2

    for agent in ("agent_0", "agent_1"):
        path = str(run / "export" / agent)
        spoken = subprocess.run([sys.executable, "-c", SPEAK, path], capture_output=True, text=True, timeout=300)
        assert spoken.returncode == 0, spoken.stderr
        assert spoken.stdout.strip()
