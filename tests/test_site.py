"""The site: it builds without a warning, has what is declared, and its addresses are the pages'."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dlm.cli.main import COMMANDS
from dlm.cli.reference import TOPICS

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".github/site"


def module(name: str) -> ModuleType:
    """A file of the site's configuration."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    pytest.importorskip("furo", reason="needs the extra docs")
    pytest.importorskip("jax", reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-c", SITE]
    done = subprocess.run([*build, ROOT, out], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_it_builds_and_no_link_is_broken(site: Path) -> None:
    """A warning is an error: a page in no list, a link to nothing, a name that is not described."""
    assert (site / "index.html").exists()
    assert (site / "dlm/client/index.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_the_reference_has_every_entry(site: Path, topic: str) -> None:
    """Settings, events, metrics and errors, as `dlm explain` has them."""
    page = topic if topic in ("events", "metrics", "errors") else "settings"
    text = (site / f"reference/{page}.html").read_text(encoding="utf-8")
    for found in TOPICS[topic]().tables.values():
        assert not [entry.name for entry in found if entry.name not in text]


@pytest.mark.slow
def test_the_reference_has_every_command_and_alert(site: Path) -> None:
    """Those of groups too; an alert links to its section of the runbook."""
    commands = (site / "reference/commands.html").read_text(encoding="utf-8")
    assert not [name for name in [*COMMANDS, "privacy plan"] if f"dlm {name}<" not in commands]
    rules = (ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8")
    alerts = (site / "reference/alerts.html").read_text(encoding="utf-8")
    links = re.findall(r'deploy/runbook\.html#(\w+)"', alerts)
    assert links == [name.lower() for name in re.findall(r"- alert: (\w+)", rules)]


# What users look for, and where it is.
SEARCHES = {
    "deadline_s": "reference/settings",
    "ShardDown": "reference/errors",
    "kenlm": "dlm/asr/index",
    "DlmOverloaded": "deploy/runbook",
    "helm": "deploy/kubernetes",
    "epsilon": "dlm/federated/index",
    "lmplz": "dlm/estimate/index",
    "hotwords": "dlm/client/PHRASES",
    "server.sets.rejected": "reference/events",
    "transcribe": "reference/commands",
    "SIGBUS": "troubleshooting",
    "hedging": "glossary",
}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "page"), SEARCHES.items())
def test_its_search_finds_what_users_look_for(site: Path, words: str, page: str) -> None:
    """The index that the browser reads has the page under each of these words."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    number = index["docnames"].index(page)
    for word in re.findall(r"\w+", words.lower()):
        terms = [*index["terms"].items(), *index["titleterms"].items()]
        fitting = [places for term, places in terms if word.startswith(term)]
        pages = {
            p for places in fitting for p in (places if isinstance(places, list) else [places])
        }
        assert number in pages, word


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("README.md", "index"),
        ("dlm/asr/README.md", "dlm/asr/index"),
        ("shards/FORMAT.md", "shards/FORMAT"),
        (".github/site/reference/errors.md", "reference/errors"),
    ],
)
def test_a_page_has_the_address_of_its_file(file: str, page: str) -> None:
    """README is its folder's; those of the site itself lie at the top."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    assert module("pages").address(Path(file)) == page


def test_a_page_with_two_titles_gets_one() -> None:
    """Comments in code are no titles."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    convert = module("pages").with_one_title
    text = "# One\n## a\n```sh\n# no\n```\n# Two\n"
    assert convert(text) == "# One\n### a\n```sh\n# no\n```\n## Two\n"
    assert convert("# One\n## a\n```\n# no\n```\n") == "# One\n## a\n```\n# no\n```\n"


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        (
            "Scores.\n\nRaises  QueryError  no such word",
            ":Raises:\n    * ``QueryError``: no such word",
        ),
        (
            "Scores.\n\nArgs\n    a   one\n        more\n    bb  two",
            "    * ``a``: one more\n    * ``bb``: two",
        ),
        ("Scores::\n\n    code  here", "::\n\n        code  here"),
    ],
)
def test_a_docstring_becomes_lists_and_code(docstring: str, text: str) -> None:
    """As this project writes headings, names and texts."""
    assert text in "\n".join(module("docstrings").converted(docstring.split("\n")))
