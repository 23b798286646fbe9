"""Damaged shard sets: cut at every edge, flipped at every byte that matters; never a score."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dlm.errors import ShardFormatError
from dlm.index import layout
from dlm.index.check.verify import verify
from dlm.index.search.local import LocalModel
from models import build, random_model, seal

# The quick run takes each twenty-third of the bytes.
STEPS = [23, pytest.param(1, marks=pytest.mark.slow)]  # of the bytes, one in so many


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set in two shards; its model lies beside it."""
    return build(random_model(7, per_order=12), tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(good, tmp_path / "set")
    return tmp_path / "set"


def refused(folder: Path) -> None:
    """Neither opening nor verifying lets the set pass, and nothing else is raised."""
    with pytest.raises(ShardFormatError):
        LocalModel.open(folder)
    report = verify(folder)
    assert report.violations
    assert not report.ok


def buffer_edges(path: Path) -> list[int]:
    """Where each buffer of an Arrow file begins and ends, and the edges of its metadata."""
    data = path.read_bytes()
    buffer = pa.py_buffer(data)
    batch = pa.ipc.open_file(buffer).get_batch(0)
    edges = {0, 8, len(data) - 10, len(data) - 6, len(data) - 1}
    footer = int.from_bytes(data[-10:-6], "little")
    edges.add(len(data) - 10 - footer)
    for column in batch.columns:
        for part in column.buffers():
            if part is not None and part.size:
                begin = part.address - buffer.address
                edges |= {begin, begin + part.size}
    return sorted(edge for edge in edges if 0 <= edge < len(data))


def names(good: Path) -> list[str]:
    return sorted(path.name for path in good.glob("*.arrow"))


@pytest.mark.parametrize("beside", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (-1, 1))])
def test_a_file_cut_at_any_edge_of_a_section_is_refused(
    beside: int, good: Path, folder: Path
) -> None:
    """Every start and end of a buffer, of the schema and of the footer, and a byte beside each."""
    cuts = 0
    for name in names(good):
        whole = (good / name).read_bytes()
        for edge in buffer_edges(good / name):
            if 0 <= edge + beside < len(whole):
                (folder / name).write_bytes(whole[: edge + beside])
                refused(folder)
                cuts += 1
        (folder / name).write_bytes(whole + b"\0")
        refused(folder)
        (folder / name).write_bytes(whole)
    assert cuts > 40
    LocalModel.open(folder)


def test_a_file_cut_and_a_manifest_that_agrees_are_refused(good: Path, folder: Path) -> None:
    """The size and checksum are right then; what Arrow finds is told as a fault of the format."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    for position, name in enumerate(e["name"] for e in content["files"]):
        whole = (good / name).read_bytes()
        entry = content["files"][position]
        before = dict(entry)
        for edge in buffer_edges(good / name):
            (folder / name).write_bytes(whole[:edge])
            entry |= {"bytes": edge, "xxh3_128": layout.file_checksum(folder / name)}
            seal(folder, content)
            refused(folder)
        (folder / name).write_bytes(whole)
        entry |= before


@pytest.mark.parametrize("step", STEPS)
def test_a_manifest_with_any_byte_flipped_is_refused(step: int, good: Path, folder: Path) -> None:
    """Every byte, by one bit; and cut at every line."""
    text = (good / layout.MANIFEST).read_bytes()
    rng = random.Random(3)
    for at in range(0, len(text), step):
        flipped = bytearray(text)
        flipped[at] ^= 1 << rng.randrange(8)
        with pytest.raises(ShardFormatError):
            layout.parse_manifest(bytes(flipped))
    for cut in [i + k for i, c in enumerate(text) if c == ord("\n") for k in (0, 1)][:-1:step]:
        (folder / layout.MANIFEST).write_bytes(text[:cut])
        refused(folder)


def metadata_bytes(path: Path) -> list[int]:
    """The bytes of a file before its first buffer and after its last."""
    edges = buffer_edges(path)
    size = path.stat().st_size
    footer = size - 10 - int.from_bytes(path.read_bytes()[-10:-6], "little")
    start = min(edge for edge in edges if edge > 8)
    return [*range(start), *range(footer, size)]


def flips(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each byte of the metadata by one bit, and a sample of the bits of the data."""
    data = path.read_bytes()
    rng = random.Random(path.name)
    sample = sorted(rng.sample(range(len(data)), min(200, len(data))))
    for at in [*metadata_bytes(path), *sample]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        yield at, bytes(flipped)


@pytest.mark.promise("damaged_files")
@pytest.mark.parametrize("step", STEPS)
def test_a_file_with_a_byte_flipped_is_refused(step: int, good: Path, folder: Path) -> None:
    """Every byte of the headers and footers, and a sample of the data: the checksum tells."""
    manifest = layout.read_manifest(good)
    for entry in manifest.files:
        path = folder / entry.name
        for at, flipped in islice(flips(good / entry.name), 0, None, step):
            path.write_bytes(flipped)
            with pytest.raises(ShardFormatError, match="damaged"):
                layout.map_columns(path, entry)
            if at % 97 == 0:
                refused(folder)
        path.write_bytes((good / entry.name).read_bytes())


@pytest.mark.promise("damaged_files")
@pytest.mark.parametrize("step", STEPS)
def test_a_flipped_header_under_a_right_checksum_never_changes_a_score(
    step: int, good: Path, folder: Path
) -> None:
    """A crafted file: either it is refused, or its columns are those of the good one."""
    manifest = layout.read_manifest(good)
    for entry in manifest.files:
        path = folder / entry.name
        expected = layout.map_columns(good / entry.name, entry)
        data = (good / entry.name).read_bytes()
        rng = random.Random(entry.name)
        accepted = 0
        for at in metadata_bytes(good / entry.name)[::step]:
            flipped = bytearray(data)
            flipped[at] ^= 1 << rng.randrange(8)
            path.unlink()
            path.write_bytes(flipped)
            try:
                found = layout.map_columns(path, entry, verify=False)
            except ShardFormatError:
                continue
            accepted += 1
            base = len(data)
            for name, array in found.items():
                # A moved buffer is still one of this file, and the checks of `Shard.open` follow.
                assert array.nbytes <= base
                assert array.dtype == expected[name].dtype or array.dtype in (
                    layout.U32,
                    layout.U64,
                )
        assert accepted < len(metadata_bytes(good / entry.name)[::step])


def write_arrow(path: Path, batch: pa.RecordBatch, compression: str | None = None) -> None:
    """Writes any batch as an Arrow file."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), batch.schema, options=options) as writer:
        writer.write_batch(batch)


def test_an_arrow_file_of_another_shape_is_refused(good: Path, folder: Path) -> None:
    """Other types, nulls, rows, compression or metadata, under a right size and checksum."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    entry = content["files"][0]
    path = folder / entry["name"]
    batch = pa.ipc.open_file(str(good / entry["name"])).get_batch(0)
    meta = batch.schema.metadata
    words = batch.column(0)

    def of(array: pa.Array, metadata: dict[bytes, bytes] = meta) -> pa.RecordBatch:
        return pa.record_batch([array], names=["words"]).replace_schema_metadata(metadata)

    def listed(values: pa.Array, offsets: list[int]) -> pa.Array:
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)

    many = pa.array(np.zeros(20_000, np.uint8))
    bad: list[tuple[pa.RecordBatch, str | None]] = [
        (of(pa.array([1])), None),
        (of(pa.array(["text"])), None),
        (of(words.cast(pa.list_(pa.uint8()))), None),
        (of(words.cast(pa.large_list(pa.int32()))), None),
        (of(pa.array([None], pa.large_list(pa.uint8()))), None),
        (of(pa.array([[1, None]], pa.large_list(pa.uint8()))), None),
        (of(listed(words.values, [0, 2])), None),
        (of(listed(words.values, [0, 1, 2])), None),
        (of(words, {}), None),
        (of(words, {**meta, b"dlm.kind": b"shard"}), None),
        (of(words, {**meta, b"dlm.format_version": b"2"}), None),
        (of(listed(many, [0, len(many)])), "zstd"),
        (of(listed(many, [0, len(many)])), "lz4"),
        (batch.rename_columns(["word_bytes"]), None),
        (batch.append_column("more", words), None),
    ]
    for rows, compression in bad:
        path.unlink()
        write_arrow(path, rows, compression)
        entry |= {"bytes": path.stat().st_size, "xxh3_128": layout.file_checksum(path)}
        seal(folder, content)
        refused(folder)


def test_an_empty_file_and_a_folder_in_place_of_a_file_are_refused(
    good: Path, folder: Path
) -> None:
    """Even where the manifest says zero bytes."""
    content = json.loads((good / layout.MANIFEST).read_bytes())
    entry = content["files"][2]
    path = folder / entry["name"]
    path.write_bytes(b"")
    refused(folder)
    entry |= {"bytes": 0, "xxh3_128": layout.file_checksum(path)}
    seal(folder, content)
    refused(folder)
    path.unlink()
    path.mkdir()
    refused(folder)
    path.rmdir()
    refused(folder)
