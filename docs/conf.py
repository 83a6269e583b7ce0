"""How the pages of this directory and the package's docstrings become a site: `make docs`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Copies, since links of pages are looked up by real paths and would lead out of here through a symlink.
COPIES = ROOT / "docs" / "notebooks"
shutil.rmtree(COPIES, ignore_errors=True)
COPIES.mkdir()
for notebook in sorted(ROOT.glob("notebooks/*.ipynb")):
    shutil.copy2(notebook, COPIES)

project = "pbrl-lightning"
author = "pbrl-lightning authors"
# The formulas' MathJax lies in the site: it is read without a network, too.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx-mathjax-offline"]
exclude_patterns = ["_build", "jupyter_execute"]  # the second is what myst-nb writes beside the first
default_role = "code"  # single backticks of docstrings

html_theme = "furo"
html_title = "pbrl-lightning"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # the same anchors as on GitHub
# The notebooks are stored without outputs; the pages show those of the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_render_markdown_format = "myst"  # tables

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = False  # Lightning's would be shown for every hook that is overridden
napoleon_use_ivar = True
python_use_unqualified_type_names = True

# Types of other libraries (their inventories would have to be fetched), choices of texts, and what stays inside.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|lightning|transformers|peft|collections|pathlib|typing|contextlib|numpy)\..*"),
    ("py:.*", r"Tensor|nn\.Module|Optimizer|LRScheduler|PreTrainedTokenizerBase|timedelta"),
    ("py:.*", r"pbrl_lightning\.curves\.Curve"),
    ("py:.*", "RLAlgorithm|CriticType|PairSelection|Guard|Thoughts"),
    ("py:mod", r"pbrl_lightning\.models\.text_end"),
    (
        "py:.*",
        r"pbrl_lightning\.(preferences\.(collector\.Collector|journal\.\w+)|agents\.(packing\.Layout|sampling\.SamplingFields))",
    ),
]

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def _from_the_root(link: re.Match[str]) -> str:
    """A link of the README as one of a page here; directories are no pages, and keep their names."""
    text, target = link.groups()
    path = target.partition("#")[0]
    if "://" in target or not path:
        return link[0]
    if (ROOT / path).is_dir():
        return text
    if path.startswith("notebooks/"):
        return link[0]
    return f"[{text}]({target.removeprefix('docs/') if path.startswith('docs/') else f'../{target}'})"


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Shows the README as a page, and leads links to it there; other files of the repository are downloads."""
    if docname == "readme":
        readme = ROOT / "README.md"
        app.env.note_dependency(str(readme))
        source[0] = _LINK.sub(_from_the_root, readme.read_text(encoding="utf-8"))
    source[0] = source[0].replace("](../README.md", "](readme.md").replace("](../notebooks/", "](notebooks/")
    source[0] = re.sub(r"\]\((\.\./[^)#\s]+\.md)\)", r"](path:\1)", source[0])


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
    """Finds what a docstring or a type calls by its last name, or by the module where it is defined."""
    target: str = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    objects: dict[str, Any] = env.domains.python_domain.objects
    for name in (target, target.rpartition(".")[2]):
        found = [full for full in objects if f".{full}".endswith(f".{name}") and not objects[full].aliased]
        if len(found) == 1:
            entry = objects[found[0]]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, found[0])
    return None


def setup(app: Sphinx) -> None:
    """Connects the two."""
    app.connect("source-read", read_source)
    app.connect("missing-reference", resolve)
