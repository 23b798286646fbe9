"""An ARPA file in parts reads as one file; a folder that is not whole is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dlm.errors import ArpaError
from dlm.index.making import build_shard_set
from dlm.index.making.work import describe_input
from dlm.ngram.arpa import PARTS_INDEX, ArpaReader, parts_index

COMMENTS = ["provenance: {}", "two\nlines"]
COUNTS = [5, 3, 0]
SECTIONS = [
    [b"-1\t<unk>\n0\t<s>\t-0.5\n", b"-1.5\t</s>\n-1\ta\t-0.25\n-1\tb\n"],
    [b"-0.5\t<s> a\n", b"", b"-0.5\ta b\n-0.25\tb </s>\n"],
    [],
]
WHOLE = b"".join(
    [
        b"# provenance: {}\n# two\n# lines\n\\data\\\nngram 1=5\nngram 2=3\nngram 3=0\n",
        *(b"\n\\%d-grams:\n" % n + b"".join(own) for n, own in enumerate(SECTIONS, 1)),
        b"\n\\end\\\n",
    ]
)

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda text: pa.compress(text, codec="zstd", asbytes=True),
}


@pytest.fixture(params=PACKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The model in parts."""
    out = tmp_path / "model.arpa.d"
    named: list[list[tuple[str, int]]] = []
    for n, own in enumerate(SECTIONS, 1):
        named.append([])
        for i, text in enumerate(own):
            name = f"run-1/order={n}/part-{i}{request.param}"
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(PACKERS[request.param](text))
            named[-1].append((name, (out / name).stat().st_size))
    (out / PARTS_INDEX).write_bytes(parts_index(COMMENTS, COUNTS, named))
    return out


def rows(path: Path) -> list[Any]:
    """All that a reader gives, and what it says of the text."""
    with ArpaReader(path) as reader:
        found = [
            (b.order, b.first_row, b.ids.tolist(), b.log10_prob.tolist(), b.log10_backoff.tolist())
            for b in reader.batches()
        ]
        return [found, reader.comments, reader.counts, reader.text_xxh3, reader.text_bytes]


def test_parts_read_as_the_file_that_they_make_up(folder: Path, tmp_path: Path) -> None:
    """To the byte: the hash of the text is that of one file."""
    (tmp_path / "whole.arpa").write_bytes(WHOLE)
    assert rows(folder) == rows(tmp_path / "whole.arpa")


def test_shards_of_parts_are_those_of_the_file(folder: Path, tmp_path: Path) -> None:
    """Every file of the set."""
    (tmp_path / "whole.arpa").write_bytes(WHOLE)
    build_shard_set(folder, tmp_path / "parts", 2)
    build_shard_set(tmp_path / "whole.arpa", tmp_path / "whole", 2)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names
    for name in names:
        if name.endswith(".arrow"):
            theirs = (tmp_path / "whole" / name).read_bytes()
            assert (tmp_path / "parts" / name).read_bytes() == theirs


def test_the_place_of_a_fault_is_that_in_the_text(folder: Path) -> None:
    """Line and byte count over all parts."""
    with ArpaReader(folder) as reader:
        assert sum(len(batch) for batch in reader.batches()) == 8
        error = reader.error_at("fault", order=2, row=1)
    assert error.byte_offset == WHOLE.index(b"-0.5\ta b")
    assert error.line == WHOLE[: error.byte_offset].count(b"\n") + 1


def test_a_folder_in_parts_can_be_told_from_another(folder: Path) -> None:
    """By its index, which names the parts: so that a killed build of shards goes on."""
    before = describe_input(folder)
    assert before is not None
    (folder / PARTS_INDEX).write_bytes(parts_index([], [5], [[]]))
    assert describe_input(folder) != before


def test_a_folder_without_index_is_refused(folder: Path) -> None:
    """The index is written last, so what made the folder has not finished."""
    (folder / PARTS_INDEX).unlink()
    with pytest.raises(ArpaError, match=r"model\.json"):
        ArpaReader(folder)


def test_a_shard_set_is_refused_with_the_command_that_makes_it_a_file() -> None:
    """It is no folder of parts that somebody waits for."""
    with pytest.raises(ArpaError, match=r"dlm export .*exact-2"):
        ArpaReader(Path(__file__).parents[2] / "shards/tiny/exact-2")


def cut_short(part: Path) -> None:
    """By one byte."""
    part.write_bytes(part.read_bytes()[:-1])


def damaged(part: Path) -> None:
    """Of the right size, but with other bytes."""
    packed = part.read_bytes()
    kept = 12 if part.suffix else len(packed) - 1
    part.write_bytes(packed[:kept] + b"x" * (len(packed) - kept))


@pytest.mark.parametrize(
    ("damage", "when", "told"),
    [(Path.unlink, ArpaReader, "missing"), (cut_short, ArpaReader, "bytes"), (damaged, rows, "")],
)
def test_a_bad_part_is_named(
    folder: Path, damage: Callable[[Path], None], when: Callable[[Path], Any], told: str
) -> None:
    """Before anything is read, where its size tells."""
    part = next((folder / "run-1/order=2").glob("part-2*"))
    damage(part)
    with pytest.raises(ArpaError, match=f"run-1/order=2/{part.name}.*{told}"):
        when(folder)


def test_a_part_of_another_model_is_too_many_rows(folder: Path) -> None:
    """The counts of the index hold for the rows of the parts."""
    about = json.loads((folder / PARTS_INDEX).read_bytes())
    about["counts"][1] = 2
    (folder / PARTS_INDEX).write_text(json.dumps(about))
    with pytest.raises(ArpaError, match="2 2-grams, found 3"):
        rows(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version 2"),
        ({"counts": ["5"]}, "lists `comments` and `counts`"),
        ({"comments": None}, "lists `comments` and `counts`"),
        ({"parts": [[]]}, "`parts` .*`counts`"),
        ({"parts": [[{"name": "../x", "bytes": 1}], [], []]}, "`name`"),
        ({"parts": [[{"name": "/x", "bytes": 1}], [], []]}, "`name`"),
        ({"parts": [[{"name": "x"}], [], []]}, "`name`"),
        ({"parts": [["x"], [], []]}, "`name`"),
    ],
)
def test_an_index_that_is_none_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    """With what is wrong with it."""
    about = json.loads(parts_index(COMMENTS, COUNTS, [[], [], []]))
    (tmp_path / PARTS_INDEX).write_text(json.dumps(about | change))
    with pytest.raises(ArpaError, match=match):
        ArpaReader(tmp_path)


def test_an_index_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    """It is not JSON then."""
    (tmp_path / PARTS_INDEX).write_bytes(parts_index(COMMENTS, COUNTS, [[], [], []])[:-20])
    with pytest.raises(ArpaError, match="not JSON"):
        ArpaReader(tmp_path)
