"""Names, numbers and files of a shard set: shards/FORMAT.md in code.

A shard set is a folder: `manifest.json`, the vocabulary, the low orders (1- and 2-grams, which every
server and client holds) and one file a shard. The files are Arrow IPC files that hold one row; each
column is a list, and its values are mapped from disk without a copy.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from dlm.errors import ShardFormatError
from dlm.ngram.partition import MAX_SHARDS, SLOTS

FORMAT_NAME = "dlm shard set"  # DO NOT CHANGE: on disk
FORMAT_VERSION = 1  # DO NOT CHANGE: FORMAT.md says when this number grows
FEATURES: frozenset[str] = frozenset()  # feature flags that this version can read
ENCODINGS = frozenset({"exact"})
MANIFEST = "manifest.json"
MAX_ORDER = 15  # DO NOT CHANGE: a state length is four bits on disk
MAX_MANIFEST_BYTES = 64 << 20

# Bits of a `meta` byte. DO NOT CHANGE: on disk.
STATE_LENGTH_MASK = 0x0F
STORED = 0x40  # of a 2-gram: something is stored under this pair in its shard
BLANK = 0x80  # no n-gram of the model: a place-holder without a probability

U8, U32, U64, F32 = (np.dtype(x) for x in ("<u1", "<u4", "<u8", "<f4"))
Arrays = dict[str, NDArray[Any]]

# Column -> dtypes it may have, per kind of file. Offsets are 32-bit where they fit.
VOCABULARY_COLUMNS = {"word_begin": (U32, U64), "word_bytes": (U8,)}
LOW_ORDER_COLUMNS = {
    "unigram_log10_prob": (F32,),
    "unigram_backoff": (F32,),
    "unigram_meta": (U8,),
    "bigram_begin": (U32, U64),
    "bigram_word": (U32,),
    "bigram_log10_prob": (F32,),
    "bigram_backoff": (F32,),
    "bigram_meta": (U8,),
}
SHARD_COLUMNS = {
    "level_begin": (U64,),
    "node_key": (U32,),
    "node_backoff": (F32,),
    "node_child": (U32, U64),
    "node_gram": (U32, U64),
    "gram_word": (U32,),
    "gram_log10_prob": (F32,),
    "gram_meta": (U8,),
}
COLUMNS = {
    "vocabulary": VOCABULARY_COLUMNS,
    "low_orders": LOW_ORDER_COLUMNS,
    "shard": SHARD_COLUMNS,
}


def offset_dtype(largest: int) -> np.dtype[Any]:
    """The narrower of the two dtypes an offset column may have that holds `largest`."""
    return U32 if largest <= 0xFFFFFFFF else U64


def file_name(kind: str, index: int | None = None) -> str:
    """Name of a file of a shard set."""
    return f"shard-{index:04d}.arrow" if kind == "shard" else f"{kind}.arrow"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that the manifest lists: its size in bytes and its XXH3-128 in hex."""

    kind: str
    index: int | None
    name: str
    bytes: int
    xxh3_128: str
    ngrams: int  # n-grams of the model in it, blanks not counted
    blanks: int
    nodes: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a shard set is; see "Manifest" in shards/FORMAT.md.

    `text` is the file byte for byte; `shard_set` is the XXH3-128 of its content without that field.
    """

    text: bytes
    shard_set: str
    model: str
    order: int
    counts: tuple[int, ...]
    blanks: tuple[int, ...]
    unk_in_model: bool
    encoding: str
    slots: NDArray[np.uint16]
    files: tuple[FileEntry, ...]
    provenance: Mapping[str, Any]

    @property
    def shard_set_bytes(self) -> bytes:
        """The 16 bytes that name the shard set on the wire."""
        return bytes.fromhex(self.shard_set)

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return sum(entry.kind == "shard" for entry in self.files)

    @property
    def vocabulary_size(self) -> int:
        """Words, the unknown word included; ids are below this."""
        return self.counts[0] + (0 if self.unk_in_model else 1)

    def file(self, kind: str, index: int | None = None) -> FileEntry:
        """The entry of one file; `ShardFormatError` where the set has none such."""
        for entry in self.files:
            if entry.kind == kind and entry.index == index:
                return entry
        raise ShardFormatError(
            f"shard set {self.shard_set} has {self.shards} shards, "
            f"0 to {self.shards - 1}; {kind} {index} was asked for"
        )


def canonical_text(content: Mapping[str, Any]) -> bytes:
    """The one way to write `content`: a key a line, sorted, no spaces, UTF-8 in ASCII escapes."""
    lines = (
        f"{json.dumps(key)}:{json.dumps(content[key], sort_keys=True, separators=(',', ':'))}"
        for key in sorted(content)
    )
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def shard_set_id(content: Mapping[str, Any]) -> str:
    """XXH3-128, in hex, of the canonical text of `content` without its field `shard_set`."""
    rest = {key: value for key, value in content.items() if key != "shard_set"}
    return str(xxhash.xxh3_128_hexdigest(canonical_text(rest)))


def make_manifest(content: Mapping[str, Any]) -> Manifest:
    """The manifest with this content and the shard-set id that follows from it."""
    return parse_manifest(canonical_text({**content, "shard_set": shard_set_id(content)}))


def parse_manifest(text: bytes, where: str = MANIFEST) -> Manifest:
    """The manifest in `text`.

    Raises
        ShardFormatError  not JSON, not canonical, another format version, an unknown feature, an id
                          that does not fit the content, or fields that contradict each other
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
            raise ValueError(f"it does not say that it is a {FORMAT_NAME!r}")
    except (ValueError, RecursionError) as exc:
        raise ShardFormatError(
            f"{where} is no manifest: {exc}. Build the shards again, or fetch a whole copy"
        ) from exc
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ShardFormatError(
            f"{where} has format version {version!r}; this dlm reads {FORMAT_VERSION}. "
            "Use the dlm that wrote it, or build the shards again"
        )
    features = content.get("features")
    unknown = (
        sorted(str(f) for f in features if f not in FEATURES)
        if isinstance(features, list)
        else ["(not a list)"]
    )
    if unknown:
        raise ShardFormatError(
            f"{where} needs features that this dlm does not know: {', '.join(unknown)}. "
            "Use a newer dlm"
        )
    expected = shard_set_id(content)
    if content.get("shard_set") != expected or canonical_text(content) != text:
        raise ShardFormatError(
            f"{where} says it is shard set {content.get('shard_set')!r}, but its content gives "
            f"{expected}: it is damaged or was edited. Build the shards again, or fetch a whole copy"
        )
    try:
        manifest = Manifest(
            text=text,
            shard_set=content["shard_set"],
            model=content["model"],
            order=content["order"],
            counts=tuple(content["counts"]),
            blanks=tuple(content["blanks"]),
            unk_in_model=content["unk_in_model"],
            encoding=content["encoding"],
            slots=np.array(content["slots"], np.uint16),
            files=tuple(FileEntry(**entry) for entry in content["files"]),
            provenance=content["provenance"],
        )
        _check(manifest)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ShardFormatError(f"{where} contradicts itself: {exc!r}") from exc
    return manifest


def _check(m: Manifest) -> None:
    """What must hold inside one manifest; ValueError where it does not."""
    if m.encoding not in ENCODINGS:
        raise ValueError(f"encoding {m.encoding!r} is none of {sorted(ENCODINGS)}")
    if not 1 <= m.order <= MAX_ORDER:
        raise ValueError(f"order {m.order} is not in 1..{MAX_ORDER}")
    if not len(m.counts) == len(m.blanks) == m.order:
        raise ValueError("counts and blanks must have one number an order")
    if min(m.counts) < 0 or min(m.blanks) < 0:
        raise ValueError("a count below zero")
    bytes.fromhex(m.shard_set + m.model)
    wanted = [("vocabulary", None), ("low_orders", None), *(("shard", i) for i in range(m.shards))]
    if [(f.kind, f.index) for f in m.files] != wanted or not 1 <= m.shards <= MAX_SHARDS:
        raise ValueError("files must be the vocabulary, the low orders and the shards in order")
    for entry in m.files:
        if entry.name != file_name(entry.kind, entry.index):
            raise ValueError(f"a file is named {entry.name!r}")
        if min(entry.bytes, entry.ngrams, entry.blanks, entry.nodes) < 0:
            raise ValueError(f"a number below zero for {entry.name}")
    if m.slots.shape != (SLOTS,) or int(m.slots.max()) >= m.shards:
        raise ValueError(f"slots must be {SLOTS} numbers below {m.shards}")
    stored = sum(f.ngrams for f in m.files if f.kind != "vocabulary")
    if stored != sum(m.counts):
        raise ValueError(f"the files hold {stored} n-grams, the model {sum(m.counts)}")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the shard set in `directory`.

    Raises
        ShardFormatError  the folder has no manifest (a build that was killed leaves none), or as
                          `parse_manifest`
    """
    path = directory / MANIFEST
    try:
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise ShardFormatError(f"{path} has {size} bytes; no manifest is that large")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ShardFormatError(
            f"{directory} is no shard set: it has no {MANIFEST}. "
            "Make one with: dlm shard MODEL.arpa --shards B --output DIR "
            "(a build that was interrupted leaves no manifest; run it again)"
        ) from exc
    return parse_manifest(text, str(path))


def write_columns(path: Path, kind: str, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, str]:
    """Writes one file of a shard set and syncs it; returns its size in bytes and its XXH3-128."""
    columns = COLUMNS[kind]
    if list(arrays) != list(columns):
        raise ValueError(f"{kind} needs columns {list(columns)}, got {list(arrays)}")
    fields, lists = [], []
    for name, array in arrays.items():
        if array.dtype not in columns[name]:
            raise ValueError(f"column {name} of {kind} cannot be {array.dtype}")
        values = pa.array(np.ascontiguousarray(array), from_pandas=False)
        offsets = pa.array(np.array([0, len(array)], np.int64))
        lists.append(pa.LargeListArray.from_arrays(offsets, values))
        fields.append(pa.field(name, pa.large_list(values.type), nullable=False))
    schema = pa.schema(
        [f.with_type(a.type) for f, a in zip(fields, lists, strict=True)],
        metadata={"dlm.format_version": str(FORMAT_VERSION), "dlm.kind": kind},
    )
    with path.open("wb") as out:
        with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(lists, schema=schema))
        out.flush()
        os.fsync(out.fileno())
    return path.stat().st_size, file_checksum(path)


def file_checksum(path: Path) -> str:
    """XXH3-128 of a file, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def map_columns(path: Path, entry: FileEntry, *, verify: bool = True) -> Arrays:
    """The columns of one file as read-only arrays over its memory map.

    Args
        entry   what the manifest says of the file
        verify  read the whole file once and compare its checksum; without it, only the size is
                compared, and damage on disk can become a wrong score
    Raises
        ShardFormatError  the file is missing, has another size or checksum, or other columns
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.bytes:
                raise ShardFormatError(
                    f"{path} has {size} bytes, the manifest says {entry.bytes}: it is truncated or "
                    "of another build. Fetch it again, or build the shards again"
                )
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as exc:
        raise ShardFormatError(
            f"{path} is missing; the manifest beside it lists {entry.bytes} bytes under that name"
        ) from exc
    if verify:
        found = xxhash.xxh3_128_hexdigest(mapped)
        if found != entry.xxh3_128:
            raise ShardFormatError(
                f"{path} has checksum {found}, the manifest says {entry.xxh3_128}: it is damaged. "
                "Fetch it again, or build the shards again"
            )
    try:
        return _columns(path, pa.py_buffer(mapped), entry.kind)
    except (pa.ArrowException, ValueError, OSError, KeyError, TypeError) as exc:
        raise ShardFormatError(f"{path} is no {entry.kind} file of a shard set: {exc}") from exc


def _columns(path: Path, buffer: pa.Buffer, kind: str) -> Arrays:
    reader = pa.ipc.open_file(buffer)
    meta = reader.schema.metadata or {}
    if meta.get(b"dlm.kind") != kind.encode() or reader.num_record_batches != 1:
        raise ValueError(f"its metadata says {meta}")
    batch = reader.get_batch(0)
    if batch.schema.names != list(COLUMNS[kind]) or batch.num_rows != 1:
        raise ValueError(f"its columns are {batch.schema.names}, its rows {batch.num_rows}")
    batch.validate(full=True)
    arrays: Arrays = {}
    for name, dtypes in COLUMNS[kind].items():
        values = batch.column(name).values
        if values.null_count:
            raise ValueError(f"column {name} has nulls")
        arrays[name] = values.to_numpy(zero_copy_only=True)
        if arrays[name].dtype not in dtypes:
            raise ValueError(f"column {name} is {arrays[name].dtype}")
    return arrays
