"""Where the pages of the site lie: `README.md` is its folder's page, and this folder is the top.

A page with several titles, for several readers, gets one: the others become its sections.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.project import Project

TOP = Path(".github/site")


def address(path: Path) -> str:
    """The name of a page by its file, both below the root: `dlm/asr/index` of its README.md."""
    page = path.relative_to(TOP) if path.is_relative_to(TOP) else path
    if page.name == "README.md":
        page = page.with_name("index.md")
    return page.with_suffix("").as_posix()


class Pages(Project):
    """The pages by these names."""

    def path2doc(self, filename: Any) -> str | None:
        """The name of a page by its file; None for other files."""
        path = Path(filename)
        if path.is_absolute() and path.is_relative_to(self.srcdir):
            path = path.relative_to(self.srcdir)
        return address(path) if path.suffix == ".md" else None


def with_one_title(text: str) -> str:
    """Headings below the first title are one level lower if there are other titles."""
    parts = re.split(r"(^(?:```|~~~).*?^(?:```|~~~)$)", text, flags=re.M | re.S)  # code is odd
    if sum(len(re.findall(r"^# ", part, re.M)) for part in parts[::2]) < 2:
        return text
    parts[::2] = [re.sub(r"^#", "##", part, flags=re.M) for part in parts[::2]]
    return "".join(parts).replace("##", "#", 1)


def read(app: Any, page: str, source: list[str]) -> None:
    """Called with the text of each page."""
    source[0] = with_one_title(source[0])


def use(app: Any) -> None:
    """Before the pages are looked for."""
    app.project = app.env.project = Pages(app.srcdir, app.config.source_suffix)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", use)
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
