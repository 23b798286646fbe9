"""The header and the sections of KenLM's files; GOLDEN are made by its own build_binary."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from dlm.errors import KenlmFormatError
from dlm.kenlm.layout import ModelType, is_kenlm, open_file, read_layout

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.binary"))
TYPES = {
    "probing": ModelType.PROBING,
    "probing-v": ModelType.PROBING,
    "rest": ModelType.REST_PROBING,
    "trie": ModelType.TRIE,
    "trie-v": ModelType.TRIE,
    "quant": ModelType.QUANT_TRIE,
    "array": ModelType.ARRAY_TRIE,
    "quant-array": ModelType.QUANT_ARRAY_TRIE,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_its_type_its_counts_and_its_size(name: str) -> None:
    """A trie of the tiny model counts the blank of the suffix that the model lacks."""
    _, layout = open_file(GOLDEN / name)
    assert layout.model_type is TYPES[name.split(".")[1]]
    blanks = layout.model_type.is_trie
    counts = (7, 5 + blanks, 3 + blanks, 1) if name.startswith("tiny") else (175, 322, 328)
    assert layout.counts == counts
    assert layout.order == len(counts)
    assert layout.words == counts[0]
    if layout.words_at is None:
        _, stored = open_file(GOLDEN / name.replace("-v", ""))
        assert stored.words_at == layout.size


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_is_refused(name: str) -> None:
    """At every byte up to where its words begin."""
    data = np.fromfile(GOLDEN / name, np.uint8)
    end = read_layout(data, name).words_at
    end = len(data) if end is None else end + 6
    for size in {*range(300), *range(end - 300, end), *range(0, end, 97)} & set(range(end)):
        with pytest.raises(KenlmFormatError) as caught:
            read_layout(data[:size], name)
        assert caught.value.path == name


@pytest.mark.parametrize(
    ("name", "at", "change", "section", "told"),
    [
        ("tiny.trie", 0, b"\\data\\\nngram 1=7\n", "header", "not one of KenLM's"),
        ("tiny.trie", 34, b"incomplete\n", "header", "did not finish"),
        ("tiny.trie", 34, b"format version 4\n", "header", "version 4"),
        ("tiny.trie", 56, struct.pack(">3f", 0, 1, -0.5), "header", "byte order"),
        ("tiny.trie", 80, b"\2", "header", "test values"),
        ("tiny.trie", 88, b"\1", "header", "order 1"),
        ("tiny.trie", 88, b"\20", "header", "order 16"),
        ("tiny.probing", 92, struct.pack("<f", 0.5), "header", "0.5"),
        ("tiny.probing", 92, struct.pack("<f", float("nan")), "header", "nan"),
        ("tiny.trie", 96, b"\6", "header", "type 6"),
        ("tiny.trie", 100, b"\2", "header", "2; expected 0 or 1"),
        ("tiny.trie", 104, b"\2", "header", "search version 2"),
        ("tiny.trie", 108, b"\0", "header", "0 1-grams"),
        ("tiny.trie", 116, b"\xff" * 8, "header", "2-grams"),
        ("tiny.trie", 123, b"\1", "2-grams", "ends at byte"),
        ("tiny.probing", 123, b"\1", "2-grams", "ends at byte"),
        ("tiny.probing", 144, b"\1", "vocabulary", "version 1"),
        ("tiny.probing", 148, b"\11", "vocabulary", "9 words"),
        ("tiny.trie", 144, b"\7", "vocabulary", "7 words"),
        ("tiny.quant", 208, b"\1", "codes", "version 1"),
        ("tiny.quant", 209, b"\32", "codes", "26 bits"),
        ("demo.array", 0, b"", "2-grams", "version 1"),
        ("tiny.trie", -26, b"<bos>", "words", "<unk>"),
    ],
)
def test_a_faulty_header_is_refused_with_its_section(
    name: str, at: int, change: bytes, section: str, told: str
) -> None:
    """And with what was found."""
    data = np.fromfile(GOLDEN / f"{name}.binary", np.uint8)
    if name == "demo.array":
        layout = read_layout(data, name)
        at, change = layout.levels[0].highs_at - 8, b"\1"
    data[at : at + len(change) if at + len(change) else None] = list(change)
    with pytest.raises(KenlmFormatError, match=told) as caught:
        read_layout(data, name)
    assert caught.value.section == section


def test_kenlms_files_are_known_by_their_first_bytes() -> None:
    """Complete or not; an ARPA file is none."""
    assert is_kenlm((GOLDEN / FILES[0]).read_bytes()[:64])
    assert is_kenlm(b"mmap lm http://kheafield.com/code incomplete\n")
    assert not is_kenlm(b"\\data\\\n")
