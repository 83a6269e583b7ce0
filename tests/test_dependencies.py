"""What is imported is declared, and what the code reads the inside of is bounded."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"yaml": "pyyaml"}  # whose module has another name
OF_USERS = {"wandb"}  # imported only where a logger of theirs has brought it


def imported():
    """Top-level modules of others that the package imports, and a file that does."""
    found = {}
    for path in [*(ROOT / "pbrl_lightning").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {
        name: file for name, file in found.items() if name not in sys.stdlib_module_names and name != "pbrl_lightning"
    }


def declared(requirements):
    return {re.match(r"[\w-]+", line)[0].lower(): line for line in requirements}


def test_every_import_is_declared():
    known = declared(PROJECT["dependencies"]) | declared(PROJECT["optional-dependencies"]["datasets"])
    others = {name: file for name, file in imported().items() if name not in OF_USERS}
    missing = {name: file for name, file in others.items() if DISTRIBUTIONS.get(name, name).lower() not in known}
    assert missing == {}


@pytest.mark.parametrize("name", ["torch", "lightning", "transformers", "peft", "jsonargparse"])
def test_libraries_whose_inside_is_read_are_bounded_around_the_tested_version(name):
    from packaging.requirements import Requirement

    requirement = Requirement(declared(PROJECT["dependencies"])[name])
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = next(line.partition("==")[2] for line in lines if line.partition("==")[0] == name)
    assert requirement.specifier.contains(tested)
    assert any(part.operator == "<" for part in requirement.specifier)
