"""How Sphinx builds the site: `make docs`, without a network."""

import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

# Before JAX starts: tutorials train on four devices, and Keras runs on JAX.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TAILRACE_DEVICES", "4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # no log lines in the outputs
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

project = "Tailrace"
author = "the Tailrace developers"
copyright = "the Tailrace developers"
version = release = re.search(
    r'"(.+)"', (ROOT / "src" / "tailrace" / "_version.py").read_text()
).group(1)

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "upstream/*.py"]

# -- Markdown ---------------------------------------------------------------------------------------
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages start where they like
nb_execution_mode = "cache"
nb_execution_timeout = 1800  # a cell, on a busy machine
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # with tables
nb_execution_cache_path = str(ROOT / ".cache" / "docs")

# -- the reference ----------------------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "code"  # docstrings write `code` as Markdown does
# Where a front end's library is missing, its names are read without it.
autodoc_mock_imports = [
    name for name in ("torch", "torchax", "keras") if not importlib.util.find_spec(name)
]

# -- HTML -------------------------------------------------------------------------------------------
html_theme = "sphinx_book_theme"
html_title = "Tailrace"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # a second search field, above the page; the sidebar has one
}
html_show_sourcelink = False
html_copy_source = False

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:src|tests|examples|scripts|benchmarks)/[^)#]*)\)"
)
"""Links of Markdown pages to files that are not pages: in the site they are names."""


def _read(app, page, source):
    text = source[0].replace("../../benchmarks/RESULTS.md", "../results.md")
    text = text.replace("../benchmarks/RESULTS.md", "results.md")
    source[0] = OUTSIDE.sub(r"\1 (`\2`)", text)


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", _read)
