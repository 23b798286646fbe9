"""Each promise has a page and tests: those that are marked with its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from promises import TESTS, Marked, marked, promises
from test_docs import USER_PAGES

ROOT = TESTS.parent


def test_every_promise_has_tests_and_every_mark_a_promise() -> None:
    """By name."""
    names = {name for page in promises().values() for name in page}
    assert {one.promise for one in marked()} == names


def test_every_page_for_users_has_its_promises() -> None:
    """Each sentence once, on a page that is there."""
    found = promises()
    without = set(USER_PAGES) - found.keys()
    assert without == {"dlm/spark/README.md"}  # that of dlm/estimate
    assert all((ROOT / page).exists() for page in found)
    sentences = [sentence for page in found.values() for sentence in page.values()]
    names = [name for page in found.values() for name in page]
    assert len(set(sentences)) == len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('@pytest.mark.promise("a")\ndef test_one(): ...', [("a", "test_one", False)]),
        (
            '@pytest.mark.slow\n@pytest.mark.promise("a")\n@pytest.mark.promise("b")\n'
            "async def test_one(): ...",
            [("a", "test_one", True), ("b", "test_one", True)],
        ),
        (
            'pytestmark = [pytest.mark.slow]\n@pytest.mark.promise("a")\ndef test_one(): ...',
            [("a", "test_one", True)],
        ),
        ("@pytest.mark.slow\ndef test_one(): ...", []),
    ],
)
def test_marks_are_found(tmp_path: Path, text: str, found: list[tuple[str, str, bool]]) -> None:
    """Of a test or its file, with those that make it slow."""
    (tmp_path / "test_a.py").write_text(text)
    assert list(marked(tmp_path)) == [Marked(a, "test_a.py", b, c) for a, b, c in found]
