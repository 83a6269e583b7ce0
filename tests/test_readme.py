"""The README: its example runs, its links lead somewhere, its log names are the ones that are logged."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pbrl_lightning.tasks.coordination import eval_items, train_items

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("readme")
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    code = code.replace('"path-or-name"', '"builtin:tiny"')
    # A tiny budget; the code itself stays as it is printed.
    code = code.replace("replay=Lambda", "num_candidates=3, sampling=SamplingConfig(max_new_tokens=3), replay=Lambda")
    code = code.replace(
        'accelerator="auto"', f'accelerator="cpu", default_root_dir={str(directory)!r}, log_every_n_steps=1'
    )
    names = {"items": train_items()[:4], "held_out": eval_items()[:2]}
    exec("from pbrl_lightning import SamplingConfig\n" + code, names)
    return next(directory.rglob("events.out.tfevents*")).parent


def test_the_notebook_example_runs(example_run):
    assert len(list((example_run / "replay").glob("iteration_*.json"))) == 3
    assert (example_run / "export" / "agent_1" / "config.json").exists()
    assert (example_run / "history" / "initial" / "agent_0").is_dir()


def test_every_scalar_that_is_logged_stands_in_the_readme(example_run):
    events = EventAccumulator(str(example_run))
    events.Reload()
    logged = set(events.Tags()["scalars"]) - {"epoch"}
    assert {"train/loss", "eval/turn_1/reward_mean", "iter/current_iteration", "env_step"} <= logged
    # The table says once that what is logged of each agent has its name at the end.
    missing = [name for name in logged if f"`{re.sub(r'/agent_[0-9]+$', '', name)}`" not in README]
    assert not missing
    assert any("eval/samples" in tag for tag in events.Tags()["tensors"])


def test_links_lead_to_files():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_two_commands_are_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("quickstart", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
