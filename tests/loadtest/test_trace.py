"""Traces: written and read again, and bad ones refused with the row at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlm.errors import FormatError
from loadtest.traces.trace import HEADER, SCHEMA, Request, Spoken, read_trace, write_trace

SHARED = Request(0.5, "lattice", ((b"<s>",), (), (b"a", b"\xff")), ((b"b", b"c"),))
PAIRED = Request(1.0, "frame", ((b"a",), (b"b",)), ((b"x",), (b"y",)))
BLOCK = Request(0.5, "frame", ((b"a",),), (), "context_blocks")
NOTHING = Request(0.0, "frame", (), ())
SPOKEN = [Spoken("one", "ada", 1.0, (SHARED, PAIRED)), Spoken("two", "bob", 2.5, (NOTHING, BLOCK))]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Words that are not UTF-8, the empty context and a request for nothing included."""
    write_trace(tmp_path / "t.parquet", SPOKEN, {"model": "m"})
    trace = read_trace(tmp_path / "t.parquet")
    assert list(trace.utterances()) == SPOKEN
    assert trace.about == {"model": "m", "version": 1}
    assert trace.queries.tolist() == [6, 2, 0, 0] == [r.queries for s in SPOKEN for r in s.requests]
    assert trace.audio_s == 3.5
    assert trace.audio_share_s.tolist() == [0.5, 0.5, 1.25, 1.25]
    assert trace.asks.tolist() == [True, True, False, True]


def test_other_tools_read_the_columns(tmp_path: Path) -> None:
    """By their names, as the page of the format gives them."""
    write_trace(tmp_path / "t.parquet", SPOKEN, {})
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert rows[1]["contexts"] == [[b"a"], [b"b"]]
    page = (Path(__file__).parents[2] / "loadtest/traces/README.md").read_text()
    assert all(f"| `{name}` |" in page for name in SCHEMA.names)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "phone"}, "kind is 'phone'; expected"),
        ({"call": "score"}, "call is 'score'; expected"),
        ({"call": "context_blocks"}, "context_blocks is called with words"),
        ({"at_s": 1.2}, "row 0 .*at_s "),
        ({"at_s": float("nan")}, "at_s "),
        ({"utterance_s": 0.0}, "utterance_s .*above 0"),
        ({"utterance_s": 3e38}, "utterance_s .* 86400"),
        ({"words": [[b"a"], [b"b"], [b"c"]]}, "neither one row nor a row for each context"),
        ({"words": [[b"a"], [b"b", b"c"]]}, "differ in length"),
        ({"words": []}, "words has neither"),
        ({"words": [[]]}, "no words are requested"),
        ({"contexts": []}, "words are requested without a context"),
        ({"contexts": [[b""], [b"a"]]}, "an empty word"),
        ({"speaker": None}, "1 nulls in column speaker"),
        ({"contexts": [[None], [b"a"]]}, "nulls within"),
    ],
)
def test_rows_that_cannot_be_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """With the row and the rule."""
    row = {
        "utterance": "u",
        "speaker": "s",
        "utterance_s": 1.0,
        "at_s": 0.5,
        "kind": "frame",
        "call": "extend",
        "contexts": [[b"a"], [b"b"]],
        "words": [[b"x"], [b"y"]],
    }
    path = tmp_path / "t.parquet"
    schema = pa.schema([pa.field(f.name, f.type) for f in SCHEMA], {HEADER: b'{"version": 1}'})
    pq.write_table(pa.Table.from_pylist([row], schema), path)
    read_trace(path)
    pq.write_table(pa.Table.from_pylist([{**row, **changed}], schema), path)
    with pytest.raises(FormatError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "without the metadata 'dlm.trace'"),
        (b"no json", "no version"),
        (b"[" * 100_000, "no version"),
        (json.dumps({"version": 2}).encode(), "version 2; .* 1"),
    ],
)
def test_other_parquet_files_are_refused(
    tmp_path: Path, header: bytes | None, message: str
) -> None:
    """And traces of another version, with what to do."""
    schema = SCHEMA.with_metadata({HEADER: header} if header else None)
    pq.write_table(schema.empty_table(), tmp_path / "t.parquet")
    with pytest.raises(FormatError, match=message):
        read_trace(tmp_path / "t.parquet")


@pytest.mark.parametrize("column", ["utterance", "call"])
def test_names_that_are_not_utf8_are_refused(tmp_path: Path, column: str) -> None:
    """Which parquet's readers do not check; words may be any bytes."""
    path = tmp_path / "t.parquet"
    write_trace(path, SPOKEN, {})
    table = pq.read_table(path)
    bad = pa.array([b"\xff\xfe"] * table.num_rows).view(pa.string())
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, bad), path)
    with pytest.raises(FormatError, match=f"column {column}"):
        read_trace(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """In the pages, by their checksums, wherever a damaged value would still be allowed."""
    path = tmp_path / "t.parquet"
    write_trace(path, SPOKEN, {})
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    for at in range(4, len(whole) - footer, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert list(read_trace(path).utterances()) == SPOKEN
        except FormatError:
            continue


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    """Text, a damaged trace, one whose rows of an utterance are apart, an empty one."""
    path = tmp_path / "t.parquet"
    path.write_text("once upon a time")
    with pytest.raises(FormatError, match=r"t\.parquet"):
        read_trace(path)
    write_trace(path, SPOKEN, {})
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole.replace(b"speaker", b"speak\xffr")):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"t\.parquet"):
            read_trace(path)
    with pytest.raises(FormatError, match="consecutive"):
        write_trace(path, [SPOKEN[0], SPOKEN[1], SPOKEN[0]], {})
    with pytest.raises(FormatError, match="no requests"):
        write_trace(path, [], {})
    without = pa.table({"utterance": ["u"]}).replace_schema_metadata({HEADER: b'{"version": 1}'})
    speaker = pa.array(["s"])
    twice = without.append_column("speaker", speaker).append_column("speaker", speaker)
    for table in (without, twice):
        pq.write_table(table, path)
        with pytest.raises(FormatError, match="column speaker"):
            read_trace(path)
