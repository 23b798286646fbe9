"""shards/tiny is what FORMAT.md says, what the builder makes, and scores as summed by hand; the
demo's shard set, which comes with the package, is what the builder makes too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from dlm.index import layout
from dlm.index.check.verify import verify
from dlm.index.making import build_shard_set
from dlm.index.packed import kernels, low
from dlm.ngram.partition import hash_pairs, slots_of

SHARDS = Path(__file__).parents[2] / "shards"
ARPA = SHARDS / "tiny" / "tiny.arpa"
SET = SHARDS / "tiny" / "exact-2"
DATA = Path(__file__).parents[2] / "dlm" / "data"

# The Arrow library that wrote the files. Another one may lay out its headers otherwise: then only
# the columns are compared, which are what the format promises.
PYARROW_MAJOR = "26"


def columns(folder: Path) -> dict[str, layout.Arrays]:
    """Every column of every file."""
    return {
        entry.name: layout.map_columns(folder / entry.name, entry)
        for entry in layout.read_manifest(folder).files
    }


def shown(column: str, values: np.ndarray) -> str:
    """A column as the document writes it: numbers in decimal, bytes and packed words in hex."""
    if values.dtype == np.uint64 and column != "shape":
        return " ".join(f"{v:X}" for v in values[::-1].tolist())
    if values.dtype == np.uint8:
        return " ".join(f"{v:02X}" for v in values.tolist())
    if values.dtype == np.float32:
        return " ".join(f"{v:g}" for v in values.tolist())
    return " ".join(str(v) for v in values.tolist())


def example() -> str:
    """The example of the document, as example.txt has it, from the files."""
    manifest = layout.read_manifest(SET)
    arrays = columns(SET)
    lines = [f"model      {manifest.model}", f"shard_set  {manifest.shard_set}"]
    lines += [f"counts     {list(manifest.counts)}", f"blanks     {list(manifest.blanks)}"]
    pair = np.array([2], np.uint32), np.array([3], np.uint32)
    slot = int(slots_of(*pair)[0])
    digest = int(hash_pairs(*pair)[0])
    lines.append(f"(b, c)     XXH64 {digest:016X}, slot {slot}, shard {manifest.slots[slot]}")
    for name, file in arrays.items():
        lines += ["", f"{name}, {manifest.file(*kind_of(name)).bytes} bytes"]
        for column, values in file.items():
            dtype = {"u": "u", "f": "f"}[values.dtype.kind] + str(8 * values.dtype.itemsize)
            lines.append(f"  {column:18} {dtype:3}  {shown(column, values)}".rstrip())
    data = (SET / "vocabulary.arrow").read_bytes()
    at = data.index(b"<unk>\na\nb\nc\n") // 16 * 16
    lines += ["", "vocabulary.arrow, the bytes of its words"]
    lines += [f"  {i:08x}  {data[i : i + 16].hex(' ')}" for i in (at, at + 16)]
    return "\n".join(lines) + "\n"


def kind_of(name: str) -> tuple[str, int | None]:
    """Kind and index of a file by its name."""
    if name.startswith("shard-"):
        return "shard", int(name[6:10])
    return name.removesuffix(".arrow"), None


@pytest.mark.promise("same_bytes")
def test_the_example_of_the_document_is_true() -> None:
    """Every number in it comes from the files."""
    assert (SHARDS / "tiny/example.txt").read_text(encoding="utf-8") == example()


def test_the_hash_in_the_document_is_true() -> None:
    """From its definition, and by the code."""
    text = (SHARDS / "FORMAT.md").read_text(encoding="utf-8")
    plain = xxhash.xxh64_intdigest(bytes.fromhex("0500000006000000"), seed=0)
    pair = np.array([5], np.uint32), np.array([6], np.uint32)
    assert plain == int(hash_pairs(*pair)[0])
    assert f"`{plain:016x}`, slot {plain % 4096}." in " ".join(text.split())
    assert int(slots_of(*pair)[0]) == plain % 4096


def test_the_constants_of_the_document_are_those_of_the_code() -> None:
    """Names and bits that reach disk."""
    text = (SHARDS / "FORMAT.md").read_text(encoding="utf-8")
    for kind in layout.COLUMNS:
        for column in layout.COLUMNS[kind]:
            assert f"| `{column}` |" in text, (kind, column)
    for word in (layout.FORMAT_NAME, "9E3779B97F4A7C15", "STORED alone"):
        assert word in text
    found = low.ONE_FLAG, low.ALL_FLAGS, low.NOT_EXTENDED, low.BLOCK_WORDS, low.FIRST, low.EXTENDED
    assert found == (1, 3, 3, 16, 32, 48)
    assert kernels.DIRECT == 8
    assert (layout.FORMAT_VERSION, layout.MAX_ORDER) == (3, 15)


def test_the_golden_set_keeps_every_rule() -> None:
    """And holds its ARPA file."""
    report = verify(SET, arpa=ARPA)
    assert report.ok, report.violations


@pytest.mark.promise("same_bytes")
@pytest.mark.parametrize(
    ("arpa", "folder"), [(ARPA, SET), (DATA / "books20k.arpa.zst", DATA / "books20k")]
)
def test_building_a_set_of_this_repository_again_gives_the_same(
    arpa: Path, folder: Path, tmp_path: Path
) -> None:
    """The columns always; the bytes with the same Arrow library."""
    golden = layout.read_manifest(folder)
    built = build_shard_set(arpa, tmp_path / "set", golden.shards)
    again, before = columns(tmp_path / "set"), columns(folder)
    assert list(again) == list(before)
    same_arrow = pa.__version__.split(".")[0] == PYARROW_MAJOR
    for name in before:
        if same_arrow:
            assert (tmp_path / "set" / name).read_bytes() == (folder / name).read_bytes(), name
        for column, values in before[name].items():
            assert again[name][column].dtype == values.dtype, column
            assert again[name][column].tobytes() == values.tobytes(), column
    ours, theirs = json.loads(built.text), json.loads(golden.text)
    assert built.model == golden.model
    for content in (ours, theirs):
        del content["provenance"]["builder"]  # the version of dlm
        del content["check"]
        if not same_arrow:
            del content["shard_set"]
            for entry in content["files"]:
                del entry["bytes"], entry["xxh3_128"]
    assert ours == theirs
