"""The page of a gateway in a real browser, as a person uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import ModelFiles, until
from gateway.browser import Browser
from gateway.gateways import Caller, ThreadGateway

pytestmark = pytest.mark.slow

WORDS = "[...document.querySelectorAll('#words tr')].map(row => row.cells[0].innerText)"
ROWS = (
    "[...document.querySelectorAll('#words tr')].map(row => [...row.cells].map(c => c.innerText))"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Without anything open."""
    made = Browser()
    yield made
    made.close()


def pictured(browser: Browser, tmp_path: Path, name: str) -> None:
    """Writes a picture, for people who look at them: into $DLM_PICTURES, where it is set."""
    folder = Path(os.environ.get("DLM_PICTURES", tmp_path))
    browser.screenshot(folder / f"{name}.png")


def opened(browser: Browser, gateway: ThreadGateway, **window: Any) -> None:
    """Opens the page, and waits until it shows the first sentence and the servers."""
    browser.open(f"http://127.0.0.1:{gateway.running.http_port}/", **window)
    browser.until("document.querySelectorAll('#words tr').length == 5")
    browser.until("document.querySelectorAll('#servers tr').length == 2")


def test_a_person_types_and_sees(
    browser: Browser,
    gateway: ThreadGateway,
    callers: dict[str, Caller],
    files: ModelFiles,
    tmp_path: Path,
) -> None:
    """With the keyboard alone: each word with its score, order and shard; a next word by Enter."""
    opened(browser, gateway)
    browser.run("document.querySelector('#sentence').focus()")
    browser.run("document.querySelector('#sentence').select()")
    a, b, c = files.words()[5:8]
    browser.type(f"{a} {b} {c} <b>lacking</b>")
    browser.until(f"{WORDS}[3] == '<b>lacking</b> (unknown)'")
    score = callers["grpc"](
        "Score", sentences=[f"{a} {b} {c} <b>lacking</b>"], with_shards=True
    ).scores[0]
    rows = browser.run(ROWS)
    assert [row[0] for row in rows] == [a, b, c, "<b>lacking</b> (unknown)", "</s>"]
    assert [row[1] for row in rows] == [f"{one:.3f}" for one in score.log10_probs]
    assert [row[2] for row in rows] == [f"{order}-gram" for order in score.matched_orders]
    by = [f"shard {one - 1}" if one else "this gateway" for one in score.shards]
    assert [row[3] for row in rows] == by
    assert "1 unknown" in browser.text("#total")
    pictured(browser, tmp_path, "typed")
    focused = "document.activeElement.closest('#next') && document.activeElement.innerText"
    while not (chosen := browser.run(focused)):
        browser.press("Tab")
    word = chosen.split()[0]
    browser.press("Enter")
    browser.until(f"{WORDS}.length == 6")
    assert browser.run(WORDS)[4] == word
    assert browser.run("document.activeElement.id") == "sentence"
    assert browser.text("#problem") == ""
    assert not browser.problems


def test_two_sentences_and_phrases_are_compared(
    browser: Browser,
    gateway: ThreadGateway,
    callers: dict[str, Caller],
    files: ModelFiles,
    tmp_path: Path,
) -> None:
    """With their difference, phrases counted; an unknown word in capitals has a way to lower it."""
    opened(browser, gateway)
    a, b, c = files.words()[5:8]
    texts = [f"{a} {b} {c}", f"{c} {b.upper()}"]
    for field, text in zip(("sentence", "other", "phrases"), [*texts, f"{c} = 3"], strict=True):
        browser.run("document.querySelector('details').open = true")
        browser.run(f"document.querySelector('#{field}').focus()")
        browser.run(f"document.querySelector('#{field}').select()")
        browser.type(text)

    def difference(asked: list[str]) -> str:
        request = {"sentences": asked, "phrases": {"phrases": [{"text": c, "bonus": 3.0}]}}
        first, second = callers["grpc"]("Score", **request).scores
        sums = [one.log10_prob + one.bonus for one in (first, second)]
        return f"log10 P differs by {abs(sums[0] - sums[1]):.3f}, phrases included"

    browser.until(
        f"document.querySelector('#difference').innerText.endsWith({difference(texts)!r})"
    )
    assert "with phrases" in browser.text("#total")
    assert "perplexity" in browser.text("#other-total")
    pictured(browser, tmp_path, "compared")
    browser.run("document.querySelector('#other-words button').click()")
    browser.until(f"document.querySelector('#other').value == '{c} {b}'")
    browser.until("!document.querySelector('#other-total').innerText.includes('unknown')")
    assert not browser.problems


def test_the_cluster_is_seen_alive(
    browser: Browser,
    gateway: ThreadGateway,
    callers: dict[str, Caller],
    files: ModelFiles,
    tmp_path: Path,
) -> None:
    """Queries per second, percentiles, local hits, fallback and balance move with the load."""
    opened(browser, gateway)
    words, numbers = files.words()[3:], "[...document.querySelectorAll('#traffic dd')]"
    shown = f"{numbers}.map(one => one.innerText)"

    def loaded() -> bool:
        callers["grpc"]("Score", sentences=[" ".join(words)] * 20)
        return "–" not in (browser.run(shown) or ["–"])

    until(loaded)
    pictured(browser, tmp_path, "cluster")
    per_second, p50, p99, local, fallback, balance = browser.run(shown)
    assert float(per_second.replace(",", "")) > 0
    assert all(one.startswith("≤ ") and one.endswith(" ms") for one in (p50, p99))
    assert 0 < float(local.split()[0]) <= 100
    assert fallback == "0.0 %"
    assert float(balance) >= 1
    assert "order 4" in browser.text("#model")
    rows = browser.run("[...document.querySelectorAll('#servers tr')].map(row => row.innerText)")
    assert [row.split("\t")[0] for row in rows] == ["0", "1"]
    assert all(row.split("\t")[1:3] == ["up", "yes"] for row in rows)
    assert not browser.problems


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_is_readable(
    browser: Browser, gateway: ThreadGateway, tmp_path: Path, width: int, dark: bool
) -> None:
    """Narrow and wide, light and dark: nothing is cut off, and all text has contrast (WCAG AA)."""
    opened(browser, gateway, width=width, dark=dark)
    browser.until("document.querySelectorAll('#next button').length == 8")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    pictured(browser, tmp_path, f"{width}-{'dark' if dark else 'light'}")
    least = browser.run(
        """(() => {
          const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
          const light = (c) => c.slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const ground = (e) => {
            for (; e; e = e.parentElement) {
              const found = rgb(getComputedStyle(e).backgroundColor);
              if (found.length < 4 || found[3] > 0) return found;
            }
            return [255, 255, 255];
          };
          const texts = [...document.querySelectorAll("body *")].filter(
            (e) => e.checkVisibility() && !e.disabled && !e.parentElement.disabled &&
              [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
          return Math.min(...texts.map((e) => {
            const both = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
            return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
          }));
        })()"""
    )
    assert least >= 4.5
    # What a screen reader announces: each field and table has a name.
    assert browser.run(
        "[...document.querySelectorAll('input, textarea')].every(one => one.labels.length)"
    )
    assert browser.run(
        "[...document.querySelectorAll('table')].every(one => one.caption.innerText)"
    )


def test_a_page_without_a_token_asks_for_one(browser: Browser, opening: Any, tokens: Path) -> None:
    """And shows the answers once it has one."""
    with ThreadGateway(opening, tokens=str(tokens)) as gateway:
        browser.open(f"http://127.0.0.1:{gateway.running.http_port}/")
        browser.until("document.querySelector('#token-row')?.hidden === false")
        assert "token" in browser.text("#problem")
        browser.run("document.querySelector('#token').focus()")
        browser.type("a" * 32)
        browser.until("document.querySelectorAll('#words tr').length == 5")
        browser.until("document.querySelector('#problem').innerText == ''")
    browser.until("document.querySelector('#problem').innerText.includes('does not answer')")
