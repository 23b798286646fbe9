"""The site: pages lie beside the code they describe; this folder has its configuration.

    python -m sphinx -W --keep-going -n -c .github/site . build/site

from the root. `pages.py` gives pages their addresses; `reference.py` writes the reference.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "tests")]

from dlm import __version__  # noqa: E402

project = "dlm"
author = "The dlm authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "pages", "reference"]
root_doc = "index"
include_patterns = ["*.md", "**/*.md"]
exclude_patterns = [
    ".venv",
    "venv",
    "build",
    "dist",
    "runs",
    ".*_cache",
    "**/.*_cache",
    ".github/PULL_REQUEST_TEMPLATE.md",
    ".github/ISSUE_TEMPLATE",
    ".github/site/contents.md",  # goes below the README
]

myst_heading_anchors = 5
myst_links_external_new_tab = False
suppress_warnings = [
    "myst.header",  # a page may begin below the first level
    "misc.highlighting_failure",  # consoles with comments
]
highlight_language = "none"

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["flashlight"]
nitpicky = True
# Types of other projects, and those of dlm that no page describes: their names suffice.
nitpick_ignore_regex = [(r"py:.*", r"(?!dlm\.(errors|client)\.[A-Z]).*")]

html_theme = "furo"
html_title = "dlm"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"source_view_link": "", "top_of_page_buttons": []}
