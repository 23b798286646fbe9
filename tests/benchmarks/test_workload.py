"""The workload is real text, the same each time, and stands in its file as the driver reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.workload import MAGIC, Mix, Workload, from_text, spoken

WORDS = ["the", "a", "man", "dog", "house", "sees", "likes", "to", "from", "don't"]
MIX = Mix(lines=300, batches=4, places=2, consecutive=3, words=6, follow=2, sentences=50)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of some words, one to nine each."""
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    lines = [" ".join(rng.choice(WORDS, rng.integers(1, 10))) for _ in range(400)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def work(text: Path) -> Workload:
    """A small one."""
    return from_text(text, MIX)


def test_the_same_text_gives_the_same_workload(text: Path, work: Workload, tmp_path: Path) -> None:
    """Byte for byte, as the driver reads it."""
    work.write(tmp_path / "once")
    from_text(text, MIX).write(tmp_path / "again")
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()


def test_contexts_and_true_words_stand_in_the_text(text: Path, work: Workload) -> None:
    """Each context is at most four words of a line after `<s>`, and is asked the word after it."""
    lines = [f"<s> {line} </s>".split() for line in text.read_text().splitlines()]
    grams = {
        tuple(line[max(i - MIX.history, 0) : i]): set()
        for line in lines
        for i in range(1, len(line))
    }
    for line in lines:
        for i in range(1, len(line)):
            grams[tuple(line[max(i - MIX.history, 0) : i])].add(line[i])
    spelled = [word.decode() for word in work.table]
    begin = 0
    for i, length in enumerate(work.context_lengths.tolist()):
        context = tuple(spelled[w] for w in work.context_words[begin : begin + length])
        asked = {spelled[w] for w in work.words[i * MIX.words : (i + 1) * MIX.words]}
        assert grams[context] & asked
        assert len(asked) == MIX.words
        assert "<s>" not in asked
        begin += length
    assert begin == len(work.context_words)
    assert len(work.context_lengths) == MIX.batches * MIX.contexts


def test_sentences_are_lines_of_the_text(text: Path, work: Workload) -> None:
    """Whole, in the text's order."""
    lines = text.read_bytes().splitlines()
    sentences = work.sentences()
    assert len(sentences) == MIX.sentences
    rest = iter(lines)
    assert all(sentence in rest for sentence in sentences)


def test_file_holds_what_the_driver_reads(work: Workload, tmp_path: Path) -> None:
    """Counts, words, arrays, nothing after."""
    path = tmp_path / "workload"
    work.write(path)
    content = path.read_bytes()
    counts = np.frombuffer(content, "<u4", 8).tolist()
    assert counts[0] == MAGIC
    assert content[32 : 32 + counts[2]].split(b"\n")[: counts[1]] == work.table
    arrays = np.frombuffer(content, "<u4", offset=32 + counts[2])
    assert len(arrays) == 2 * counts[3] + counts[4] + counts[5] + counts[6] + counts[7]
    np.testing.assert_array_equal(arrays[: counts[3]], work.context_lengths)
    np.testing.assert_array_equal(arrays[-counts[7] :], work.tokens)


def test_words_are_as_a_recogniser_writes_them() -> None:
    """Lower case, letters and apostrophes; typographic apostrophes are apostrophes."""
    assert spoken("“Don’t,” he said – twice-over; 'tis 1 o'clock!\n") == [
        *("don't", "he", "said", "twice", "over", "tis", "o'clock")
    ]
