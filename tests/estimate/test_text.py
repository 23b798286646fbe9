"""Text is taken as it is, or told where it is wrong, or left out and counted."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlm.errors import ConfigError, EstimationError
from dlm.estimate.text import LineFault, Reader

TEXT = b"a b\nc \xc3\xa9\n\nlast"
LINES = [b"a b", "c é".encode(), b"", b"last"]


def lines_of(reader: Reader) -> list[bytes]:
    """All lines of all blocks."""
    out: list[bytes] = []
    for text, size in reader.blocks():
        assert text[size - 1 : size] == b"\n"
        out += text[: size - 1].split(b"\n")
    return out


def zstd(data: bytes) -> bytes:
    """Two frames, as parallel compressors write them."""
    out = io.BytesIO()
    for part in (data[:5], data[5:]):
        with pa.CompressedOutputStream(pa.PythonFile(_Kept(out), mode="w"), "zstd") as stream:
            stream.write(part)
    return out.getvalue()


class _Kept:
    """Stays open when pyarrow closes it."""

    closed = False

    def __init__(self, file: io.BytesIO) -> None:
        self.write = file.write

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_compression_is_told_from_the_bytes(
    tmp_path: Path, pack: Callable[[bytes], bytes], block_bytes: int
) -> None:
    """Whatever the name, and wherever blocks end; the last line needs no newline. A file that was
    cut short is not taken for a shorter text."""
    packed = pack(b"some words of text\n" * 1000)
    (tmp_path / "text").write_bytes(packed[:-20] * (pack is not bytes) or b"\0")
    with pytest.raises(EstimationError, match=f"{tmp_path}/text"):
        lines_of(Reader([str(tmp_path / "text")]))
    (tmp_path / "text").write_bytes(pack(TEXT))
    reader = Reader([str(tmp_path / "text")] * 2, block_bytes=block_bytes)
    assert lines_of(reader) == LINES * 2
    assert reader.totals.bytes == 2 * (len(TEXT) + 1)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstd])
def test_a_pipe_may_give_its_first_bytes_one_by_one(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """Its compression is told all the same."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    packed = pack(TEXT)

    def feed() -> None:
        with pipe.open("wb", buffering=0) as file:
            for at in range(10):
                file.write(packed[at : at + 1])
            file.write(packed[10:])

    thread = threading.Thread(target=feed)
    thread.start()
    assert lines_of(Reader([str(pipe)])) == LINES
    thread.join()


def test_parquet_rows_are_lines(tmp_path: Path) -> None:
    """A row with newlines is several; a null is a fault; the column is named."""
    table = pa.table({"text": ["a b", "c\nd", None, ""], "other": ["x", "y", "z", "z"]})
    path = str(tmp_path / "t.parquet")
    pq.write_table(table, path)
    reader = Reader([path], skip=True)
    assert lines_of(reader) == [b"a b", b"c", b"d", b""]
    assert reader.totals.skipped == {LineFault.NULL_ROW: 1}
    assert lines_of(Reader([path], column="other")) == [b"x", b"y", b"z", b"z"]
    with pytest.raises(EstimationError, match="null"):
        lines_of(Reader([path]))
    with pytest.raises(ConfigError, match=r"'none'; .*text, other"):
        lines_of(Reader([path], column="none"))


FAULTY = {
    LineFault.NOT_UTF8: b"caf\xe9 latin",
    LineFault.NUL: b"nul \0 byte",
    LineFault.RESERVED: b"a </s> b",
    LineFault.LONG_LINE: b"x " * 600,
}


@pytest.mark.promise("faulty_lines")
@pytest.mark.parametrize("fault", FAULTY)
@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_a_faulty_line_is_told_with_its_place(
    tmp_path: Path, fault: LineFault, block_bytes: int
) -> None:
    """Line and byte; or it is left out and counted, and nothing else is."""
    before = b"first line\nsecond\n"
    text = before + FAULTY[fault] + b"\nafter it\n<sx> fine\n"
    path = tmp_path / "text"
    path.write_bytes(text)
    with pytest.raises(EstimationError) as caught:
        lines_of(Reader([str(path)], block_bytes=block_bytes, max_line_bytes=1000))
    assert f"{path}, line 3 (from byte {len(before)} on)" in str(caught.value)
    assert "--skip" in str(caught.value)
    reader = Reader([str(path)], skip=True, block_bytes=block_bytes, max_line_bytes=1000)
    assert lines_of(reader) == [b"first line", b"second", b"after it", b"<sx> fine"]
    assert reader.totals.skipped == {fault: 1}
    assert reader.totals.bytes == len(text)
    assert f"{fault}: 1" in reader.totals.summary(skip=True)


def test_several_faults_have_their_own_places(tmp_path: Path) -> None:
    """A line after a gigantic one is still counted right."""
    text = b"ok\n" + b"y" * 5000 + b"\nok\n\0\n<unk>\nok"
    (tmp_path / "text").write_bytes(text)
    for block_bytes in (5, 64, 1 << 20):
        reader = Reader(
            [str(tmp_path / "text")], skip=True, block_bytes=block_bytes, max_line_bytes=100
        )
        assert lines_of(reader) == [b"ok"] * 3
        assert reader.totals.skipped == {
            LineFault.LONG_LINE: 1,
            LineFault.NUL: 1,
            LineFault.RESERVED: 1,
        }
    (tmp_path / "text").write_bytes(text.replace(b"y" * 5000, b"y"))
    with pytest.raises(EstimationError, match=r"line 4 .*byte 8 .*NUL"):
        lines_of(Reader([str(tmp_path / "text")]))


def test_nothing_to_read_is_an_error() -> None:
    """As is a file that is not there."""
    with pytest.raises(ConfigError):
        Reader([])
    with pytest.raises(FileNotFoundError):
        Reader(["/no/such/file"])


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize(
    "text", [b"", b"\n", b"a", b"a\n", b"a\n\n", b"\n\na b\nlonger line here\nx", b"a" * 200]
)
def test_blocks_hold_every_line_once(text: bytes, size: int, tmp_path: Path) -> None:
    """Wherever they end, and whether the last line has an end or not."""
    (tmp_path / "text").write_bytes(text)
    for scored in (False, True):
        blocks = Reader([str(tmp_path / "text")], scored=scored, block_bytes=size).read()
        lines = [line for block in blocks for line in block.lines.split(b"\n")]
        assert lines == text.splitlines()


def test_bytes_alone_are_words_of_text_that_is_scored(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, marks and the unknown word; where lines are left out, the first."""
    lines = [b"caf\xe9", b"a </s> b", b"<unk>", b"z" * 200_000]
    (tmp_path / "text").write_bytes(b"\n".join(lines))
    assert lines_of(Reader([str(tmp_path / "text")], scored=True)) == lines
    counting = Reader([str(tmp_path / "text")], skip=True)
    assert lines_of(counting) == []
    assert counting.totals.skipped[LineFault.LONG_WORD] == 1
    reader = Reader([str(tmp_path / "text")], scored=True, skip=True)
    assert lines_of(reader) == lines[1:]
    assert reader.totals.skipped == {LineFault.NOT_UTF8: 1}
