"""The pages for operators: commands parse, files are there, every refusal has its section."""

from __future__ import annotations

import re

import pytest

from deploy.documents import DEPLOY, ROOT, Quoted, fault_of, quoted, texts
from dlm.wire.status import Reason

PAGES = [name for name in texts() if name.endswith(".md")]
FILE = re.compile(
    r"[\w./-]+\.(?:md|yaml|yml|json|toml|env|py|proto)|systemd/[\w@-]+\.service|container/\w+"
)
# Files of the operator's own, which the pages tell how to make.
MADE = {
    "values-model.yaml",
    "values-model-3.yaml",
    "cluster-3.toml",
    "server.toml",
    "manifest.json",
}


@pytest.mark.parametrize("line", quoted(), ids=lambda q: f"{q.place}: {' '.join(q.words)}")
def test_every_command_line_parses(line: Quoted) -> None:
    """By the parser of the command itself."""
    assert fault_of(line.words) is None


def test_command_lines_are_found_where_they_are() -> None:
    """Pages, compose, unit and image."""
    places = {q.place.split(",")[0] for q in quoted()}
    expected = {"hosts.md", "security.md", "runbook.md", "compose.yaml", "Containerfile"}
    assert expected | {"README.md", "systemd/dlm-shard@.service"} <= places


@pytest.mark.parametrize(
    "line",
    [
        "dlm serve",
        "dlm serve shards/model --shard one",
        "dlm serve shards/model --shard 0 --no-such",
        "dlm no-such",
        "dlm --no-such",
    ],
)
def test_a_command_line_that_does_not_parse_is_found(line: str) -> None:
    """So that the test above is known to look."""
    assert fault_of(tuple(line.split())) is not None


@pytest.mark.promise("runbook")
@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_has_a_section_that_says_what_to_do(reason: Reason) -> None:
    """In runbook.md, under its name."""
    section = re.search(
        rf"^## {reason.value}\n\n(.*?)(?=^#|\Z)", texts()["runbook.md"], re.M | re.S
    )
    assert section, f"runbook.md has no section {reason.value}"
    assert "*Fix:*" in section[1], reason


@pytest.mark.parametrize("page", PAGES)
def test_every_file_a_page_names_exists(page: str) -> None:
    """Below deploy/ or the root of the repository."""
    for code in re.findall(r"`([^`\n]+)`|\]\(([^)#\s]+)", texts()[page]):
        for path in FILE.findall(" ".join(code)):
            if path.startswith("/") or path in MADE:
                continue
            assert (DEPLOY / path).exists() or (ROOT / path).exists(), f"{page} names {path}"


def test_references_inside_the_runbook_lead_to_sections() -> None:
    """`see DlmShardDown`, `see "Capacity"`: there is such a heading."""
    text = texts()["runbook.md"]
    headings = set(re.findall(r"^##? (.*)$", text, re.M))
    named = set(re.findall(r"\bDlm[A-Z]\w+", text)) | set(re.findall(r'[Ss]ee "([^"]+)"', text))
    assert named <= headings, named - headings


def test_panels_that_the_runbook_names_are_on_the_dashboard() -> None:
    """`panel "Queries by shard"`."""
    text = texts()["runbook.md"]
    for line in re.findall(r'panels? ((?:"[^"]+"(?:, | and )?)+)', text):
        for title in re.findall(r'"([^"]+)"', line):
            assert f'"title": "{title}"' in texts()["grafana/dlm.json"], title
