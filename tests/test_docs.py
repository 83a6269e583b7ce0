"""The examples of the documentation are what the library takes."""

import doctest
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import pbrl_lightning
from pbrl_lightning import callbacks
from pbrl_lightning.cli import PreferenceCLI
from site_links import broken_links

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


EXAMPLES = [yaml.safe_load(block) for block in blocks(ROOT / "docs/comparators.md", "yaml")]
OTHERS = [yaml.safe_load(block) for name in ("replay", "rewards") for block in blocks(ROOT / f"docs/{name}.md", "yaml")]


def test_every_comparator_has_an_example():
    shown = {
        (entry if isinstance(entry, str) else entry["class_path"]).rpartition(".")[2]
        for example in EXAMPLES
        for entry in example.values()
    }
    ours = {name for name in pbrl_lightning.__all__ if name.endswith(("Comparator", "Judge"))}
    assert shown == ours - {"Comparator", "PreferenceJudge"}


@pytest.mark.parametrize("example", EXAMPLES + OTHERS, ids=lambda example: str(next(iter(example))))
def test_an_example_builds_what_it_names(example, tmp_path):
    config = yaml.safe_load((ROOT / "configs/debug/madpo_iter.yaml").read_text(encoding="utf-8"))
    config["data"] |= example
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    data = PreferenceCLI(["--config", str(path)], run=False).datamodule
    ((option, expected),) = example.items()
    built = getattr(data.oracle if option.startswith("reward_") else data, option)
    name = expected if isinstance(expected, str) else expected["class_path"]
    assert type(built).__name__ == name.rpartition(".")[2]


def test_fault_B104_what_docs_and_configs_name_exists():
    pages = [*PAGES, *ROOT.glob("configs/**/*.yaml")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    configs = set(re.findall(r"\bconfigs/[\w/.]+\.yaml", text))
    names = set(re.findall(r"\bpbrl_lightning(?:\.[A-Za-z_]\w*)+", text))
    assert len(configs) > 20
    assert len(names) > 15
    assert [config for config in configs if not (ROOT / config).exists()] == []
    for name in names - {"pbrl_lightning.tasks.data"}:
        pkgutil.resolve_name(name)  # a module or what is in one


def test_the_sandboxed_coding_reward_of_the_page_on_tasks_is_built(tmp_path):
    (example,) = blocks(ROOT / "docs/tasks.md", "yaml")
    config = yaml.safe_load((ROOT / "configs/debug/madpo_iter.yaml").read_text(encoding="utf-8"))
    config["data"] |= yaml.safe_load(example)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    reward = PreferenceCLI(["--config", str(path)], run=False).datamodule.oracle.reward_func
    assert (reward.execute, reward.sandbox.cpu_seconds, reward.sandbox.require) == ("sandbox", 5, ("files", "syscalls"))


def prose(page):
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors that GitHub gives the headings of a page; the site gives the same."""
    found = []
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        found.append(re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-"))
    assert len(set(found)) == len(found), f"{page.name}: two headings with one anchor"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_gives_what_it_shows(page):
    shown = blocks(page, "python")
    sessions = [block for block in shown if ">>>" in block]
    for block in shown:
        if block not in sessions:
            compile(block, page.name, "exec")
    examples = doctest.DocTestParser().get_doctest("\n".join(sessions), {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples)
    assert runner.failures == 0
    assert len(examples.examples) == page.read_text(encoding="utf-8").count(">>> ")


def test_the_api_pages_hold_every_public_name():
    text = "\n".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api_*.md"))
    listed = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    public = [getattr(module, name) for module in (pbrl_lightning, callbacks) for name in module.__all__]
    assert {f"{entry.__module__}.{entry.__name__}" for entry in public} <= set(listed)
    assert len(set(listed)) == len(listed)
    overview = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert [name for name in pbrl_lightning.__all__ if f"`{name}`" not in overview] == []


def test_links_of_built_pages_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<i id="here"><a href="#here"><a href="b.html#x"><a href="https://else.where/">')
    (tmp_path / "b.html").write_text('<i id="x"><a href="a.html#gone"><a href="c.html"><img src="d.svg"><a href="#y">')
    broken = ["b.html: a.html#gone", "b.html: c.html", "b.html: d.svg", "b.html: #y"]
    assert broken_links(tmp_path) == (broken, 6)


def test_every_algorithm_page_leads_from_the_equation_to_a_test():
    for name in ("madpo", "reward_model", "policy_learning", "marlhf"):
        text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for part in ("../pbrl_lightning/", "../configs/", "../tests/test_", "## What to watch"):
            assert part in text, f"{name}.md: {part}"
