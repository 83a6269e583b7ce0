"""The notebooks run from top to bottom, learn what they say, and are stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
# What the text of a notebook claims, with room for other processors' rounding.
CLAIMS = {
    "own_comparator_and_replay": """
assert min(success for _, success in runs.values()) > 0.45
assert runs["best of 4"][0][0].comparator_reward_mean > runs["current agents"][0][0].comparator_reward_mean + 0.2
assert {number: min(drawn) for number, drawn in replay.drawn.items()} == {1: 1, 2: 1, 3: 1, 4: 2, 5: 3, 6: 4}
""",
    "quickstart_madpo": """
assert after.rewards.mean() > before.rewards.mean() + 0.4
assert wins[0] < losses[0]
assert len(rounds[-1]) < len(rounds[1])
""",
    "reading_preferences": """
assert found >= 0.8 * len(wrong)
assert still_wrong < flipped.sum() / 2
""",
    "reward_model_and_marl_by_hand": """
assert (test_margins > 0).mean() > 0.7
assert true_after.mean() > true_before.mean() + 0.4
assert learned_after.mean() > learned_before.mean()
""",
}


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_has_a_claim_that_is_checked():
    assert sorted(CLAIMS) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_begins_with_its_title_and_holds_no_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 25
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    assert [cell.outputs for cell in code_cells(notebook) if cell.outputs] == []
    assert [cell.execution_count for cell in code_cells(notebook) if cell.execution_count is not None] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_named_in_the_readme_and_a_page_of_the_documentation(path):
    assert f"(notebooks/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert f"\nnotebooks/{path.stem}\n" in index
    assert f"(../notebooks/{path.name})" in index


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_learns_what_it_says(path, tmp_path):
    notebook = read(path)
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS[path.stem]))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    said = [output.text for cell in code_cells(notebook) for output in cell.outputs if output.get("name") == "stderr"]
    assert said == []
