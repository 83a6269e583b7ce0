"""The examples of the documentation are what the library takes."""

import re
from pathlib import Path

import pytest
import yaml

import pbrl_lightning
from pbrl_lightning.cli import PreferenceCLI
from pbrl_lightning.importing import import_object

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/comparators.md").read_text(encoding="utf-8")
EXAMPLES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_every_comparator_has_an_example():
    shown = {
        (entry if isinstance(entry, str) else entry["class_path"]).rpartition(".")[2]
        for example in EXAMPLES
        for entry in example.values()
    }
    ours = {name for name in pbrl_lightning.__all__ if name.endswith(("Comparator", "Judge"))}
    assert shown == ours - {"Comparator", "PreferenceJudge"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(next(iter(example))))
def test_an_example_builds_what_it_names(example, tmp_path):
    config = yaml.safe_load((ROOT / "configs/debug/madpo_iter.yaml").read_text(encoding="utf-8"))
    config["data"] |= example
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    data = PreferenceCLI(["--config", str(path)], run=False).datamodule
    ((option, expected),) = example.items()
    built = data.oracle.reward_func if option == "reward_func" else getattr(data, option)
    name = expected if isinstance(expected, str) else expected["class_path"]
    assert type(built).__name__ == name.rpartition(".")[2]


def test_fault_B104_what_docs_and_configs_name_exists():
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("configs/**/*.yaml")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    configs = set(re.findall(r"\bconfigs/[\w/.]+\.yaml", text))
    names = set(re.findall(r"\bpbrl_lightning(?:\.[A-Za-z_]\w*)+", text))
    assert len(configs) > 20
    assert len(names) > 15
    assert [config for config in configs if not (ROOT / config).exists()] == []
    for name in names - {"pbrl_lightning.tasks.data"}:
        import_object(name)


def test_the_sandboxed_coding_reward_of_the_page_on_tasks_is_built(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/tasks.md").read_text(encoding="utf-8"), re.DOTALL)
    config = yaml.safe_load((ROOT / "configs/debug/madpo_iter.yaml").read_text(encoding="utf-8"))
    config["data"] |= yaml.safe_load(example)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    reward = PreferenceCLI(["--config", str(path)], run=False).datamodule.oracle.reward_func
    assert (reward.execute, reward.sandbox.cpu_seconds, reward.sandbox.require) == ("sandbox", 5, ("files", "syscalls"))


def test_links_lead_somewhere():
    for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        anchors = {
            re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("#"):
                assert target[1:] in anchors, f"{page.name}: {target}"
            elif "://" not in target:
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"
