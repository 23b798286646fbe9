"""Links of all Markdown pages: the file is there, and so is the heading."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = {".github", ".ci"}  # the hidden folders that are the project's


def pages(root: Path) -> list[Path]:
    """Every page of a tree, without caches and environments."""
    return sorted(
        page
        for page in root.rglob("*.md")
        if not any(
            part.startswith(".") and part not in HIDDEN for part in page.relative_to(root).parts
        )
    )


def prose(text: str) -> str:
    """A page without code: what stands there is not a link."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def links(text: str) -> list[str]:
    """Targets of links and images, inline, by reference and in HTML."""
    text = prose(text)
    found = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)", text)
    found += re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.M)
    return found + re.findall(r"<(?:a|img|source)\b[^>]*\b(?:href|src|srcset)=\"([^\"]+)\"", text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them, and those set in HTML."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    found: list[str] = re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text)
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def broken(page: Path, root: Path) -> list[str]:
    """The links of a page that lead nowhere, with the reason; the network is not asked."""
    out = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        place = (root / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
        target = page if not path else place
        if not target.exists():
            out.append(f"{link}: no such file")
        elif not target.is_relative_to(root.resolve()):
            out.append(f"{link}: outside the project")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            out.append(f"{link}: no such heading")
    return out


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in pages(ROOT)])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    """To a file of the project, and to a heading in it if the link names one."""
    assert broken(ROOT / page, ROOT) == []


def test_no_page_has_lines_of_a_conflict_of_merging() -> None:
    """Neither side's mark, which no other check of pages minds."""
    marks = re.compile(r"^(?:<{7}|>{7}) ", re.M)
    assert [page for page in pages(ROOT) if marks.search(page.read_text(encoding="utf-8"))] == []


def test_pages_are_found() -> None:
    """Those of hidden folders too; a pattern that matched nothing would pass."""
    found = {str(page.relative_to(ROOT)) for page in pages(ROOT)}
    assert {"README.md", ".github/CONTRIBUTING.md", "dlm/cli/README.md"} <= found
    assert not any(page.startswith(".venv") for page in found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](other.md)", []),
        ("[a](other.md#two-words-and-code)", []),
        ("[a](other.md#again) [b](other.md#again-1)", []),
        ("![a](picture.svg 'title') <img src=\"picture.svg\">", []),
        ("[a](https://example.org/nowhere) `[a](nowhere.md)`", []),
        ("```\n[a](nowhere.md)\n```", []),
        ("[a](nowhere.md)", ["nowhere.md: no such file"]),
        ("[a](other.md#three)", ["other.md#three: no such heading"]),
        ("[a]: nowhere.md", ["nowhere.md: no such file"]),
        ('<img src="nowhere.svg">', ["nowhere.svg: no such file"]),
        ("[a](..)", ["..: outside the project"]),
    ],
)
def test_a_planted_link_is_judged(tmp_path: Path, text: str, found: list[str]) -> None:
    """Files, headings, pictures; what is code is not a link."""
    (tmp_path / "other.md").write_text("# Two words, and `code`\n## Again\n## Again\n")
    (tmp_path / "picture.svg").write_text("<svg/>")
    page = tmp_path / f"page{abs(hash(text))}.md"
    page.write_text(text)
    assert broken(page, tmp_path) == found
