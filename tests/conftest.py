"""Set before anything imports transformers: no network, a cache of the session's own, one thread."""

import os
import tempfile
from collections.abc import Iterator

CACHE = tempfile.TemporaryDirectory(prefix="pbrl_test_cache_")
os.environ["PBRL_CACHE"] = CACHE.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402

import exact  # noqa: E402, F401

torch.set_num_threads(1)

collect_ignore_glob = ["comlrl/*", "data/*"]  # scripts that run in the environments of other libraries


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Fails a test that leaves environment variables behind, or changes them."""
    # Set by pytest itself, and by Lightning and torch once per process.
    own = ("PYTEST_", "PL_", "LIGHTNING_", "KMP_", "TORCH", "PYTORCH_", "CUBLAS_", "TF_", "TQDM_", "MPL")
    before = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    yield
    after = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    for key in changed:
        if key in before:
            os.environ[key] = before[key]
        else:
            del os.environ[key]
    assert not changed, f"the test changed the environment: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def seeded_and_restored() -> Iterator[None]:
    """Every test starts from the same global seed, and the order of tests changes nothing."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def without_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and cards have no figures, two seconds a run, but for tests marked `figures`, which look at them."""
    if request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr("pbrl_lightning.report.svg", lambda figure, salt: "<svg></svg>")
        monkeypatch.setattr("pbrl_lightning.report.curve_figure", lambda *args: None)
        monkeypatch.setattr("pbrl_lightning.report.reward_figure", lambda *args: None)
        monkeypatch.setattr("pbrl_lightning.cards.writing.curves_figure", lambda *args: None)
        monkeypatch.setattr("pbrl_lightning.cards.writing.png", lambda figure: b"")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long; left out by `make test-fast`")
    config.addinivalue_line("markers", "figures: draws what stands in reports and model cards")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Counting lines makes a test half as slow again; what slow tests alone would run, fast ones should.
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")


def pytest_unconfigure() -> None:
    CACHE.cleanup()


@pytest.fixture
def two_threads():
    """Torch with two threads, whatever the suite runs with."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
