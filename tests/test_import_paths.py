"""Callables given by import path, and what is said when there is none."""

from __future__ import annotations

import sys

import pytest

from pbrl_lightning.preferences.oracle import Oracle, resolve_callable


@pytest.fixture
def user_package(tmp_path, monkeypatch):
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(
        "LIMIT = 3\ndef score(*c): return [1.0] * len(c[0])\n"
        "class Judge:\n    @staticmethod\n    def rate(*c): return [2.0] * len(c[0])\n"
    )
    (package / "needs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.mark.usefixtures("user_package")
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("my_pkg.rewards:score", 1.0),
        ("my_pkg.rewards.score", 1.0),
        ("my_pkg.rewards:Judge.rate", 2.0),
        ("my_pkg.rewards.Judge.rate", 2.0),
    ],
)
def test_import_paths(spec, expected):
    (score,) = Oracle(spec).score([{}], [0], [["p"]], [["a"]])
    assert score.value == expected
    assert resolve_callable(resolve_callable(spec)) is resolve_callable(spec)


@pytest.mark.usefixtures("user_package")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_pkg.rewards:scor", r"`my_pkg.rewards` has no attribute `scor`; did you mean `score`\?"),
        ("my_pkg.rewards.scor", r"`my_pkg.rewards` has no attribute `scor`; did you mean `score`\?"),
        ("my_pkg.reward:score", r"there is no module `my_pkg.reward`; did you mean `rewards`\?"),
        ("my_pkg.reward.score", r"`my_pkg` has no attribute `reward`; did you mean `rewards`\?"),
        ("my_pk.rewards:score", r"there is no module `my_pk.rewards`; did you mean `my_pkg`"),
        ("qqzzx.rewards.score", r"there is no module `qqzzx.rewards`$"),
        ("my_pkg.rewards:LIMIT", r"must name a callable, got 3"),
        ("score", r"must look like `my_pkg.rewards:score`, got 'score'"),
        ("my_pkg.rewards:", r"must look like"),
        ("my pkg:score", r"must look like"),
        ("my_pkg:a:b", r"must look like"),
    ],
)
def test_import_path_errors(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve_callable(spec)


@pytest.mark.usefixtures("user_package")
def test_what_the_users_module_raises_passes_through():
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        resolve_callable("my_pkg.needs:score")
    with pytest.raises(TypeError, match="an import path or a callable is needed, got 3"):
        resolve_callable(3)
