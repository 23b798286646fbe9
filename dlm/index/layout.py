"""Names, numbers and files of a shard set: shards/FORMAT.md in code, in the same order.

A shard set is a folder: `manifest.json`, the vocabulary, the low orders (1- and 2-grams, which
every client holds) and one file per shard. The files are Arrow IPC files that hold one row; each
column is a list, and its values are mapped from disk without a copy. This module is kept whole,
at over 500 lines, to be read side by side with FORMAT.md.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from dlm.errors import ShardFormatError
from dlm.memory_options import MAPPED, MemoryOptions, hold
from dlm.ngram.partition import MAX_SHARDS, SLOTS

FORMAT_NAME = "dlm shard set"  # DO NOT CHANGE: on disk
FORMAT_VERSION = 3  # DO NOT CHANGE: FORMAT.md says when this number grows
FEATURES: frozenset[str] = frozenset()  # feature flags that this version can read
ENCODINGS = frozenset({"exact", "compact"})
MANIFEST = "manifest.json"
MAX_ORDER = 15  # DO NOT CHANGE: a state length is four bits on the wire
MAX_MANIFEST_BYTES = 64 << 20
MAX_NGRAMS = (1 << 32) - 1  # limit per order, including blanks
MAX_WORD_BYTES = 1 << 20  # the longest line of an ARPA file, which a word must fit in

U8, U32, U64, F32 = (np.dtype(x) for x in ("<u1", "<u4", "<u8", "<f4"))
Arrays = dict[str, NDArray[Any]]
Columns = dict[str, tuple[np.dtype[Any], ...]]

# The dtypes that each column may have, by kind of file; FORMAT.md says what the columns hold.
VOCABULARY_COLUMNS: Columns = {"words": (U8,)}
LOW_ORDER_COLUMNS: Columns = {
    "shape": (U64,),
    "word_value": (U64,),
    "word_entry": (U64,),
    "list": (U64,),
    "word_prob_table": (F32,),
    "word_backoff_table": (F32,),
    "pair_prob_table": (F32,),
}
SHARD_COLUMNS: Columns = {
    "shape": (U64,),
    "tree": (U64,),
    "prob_table": (F32,),
    "weight_table": (F32,),
}
COLUMNS = {
    "vocabulary": VOCABULARY_COLUMNS,
    "low_orders": LOW_ORDER_COLUMNS,
    "shard": SHARD_COLUMNS,
}


def file_name(kind: str, index: int | None = None) -> str:
    return f"shard-{index:04d}.arrow" if kind == "shard" else f"{kind}.arrow"


@dataclass(frozen=True, slots=True)
class FileEntry:
    kind: str
    index: int | None
    name: str
    bytes: int
    xxh3_128: str
    ngrams: int  # n-grams of the model in the file, without blanks
    blanks: int
    nodes: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """The description of a shard set; see "Manifest" in shards/FORMAT.md.

    text       the bytes of the manifest file
    shard_set  the id of the set, see `shard_set_id`
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

    @cached_property
    def shard_set_bytes(self) -> bytes:
        return bytes.fromhex(self.shard_set)

    @cached_property
    def shards(self) -> int:
        return sum(entry.kind == "shard" for entry in self.files)

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of words, including the unknown word; word ids are below this number."""
        return self.counts[0] + (0 if self.unk_in_model else 1)

    @property
    def pairs(self) -> int:
        """The number of 2-grams, including blanks; the 2-grams are numbered from 0."""
        return sum(self.counts[1:2]) + sum(self.blanks[1:2])

    def file(self, kind: str, index: int | None = None) -> FileEntry:
        """Returns one file's entry; raises `ShardFormatError` if the set does not list the file."""
        for entry in self.files:
            if entry.kind == kind and entry.index == index:
                return entry
        raise ShardFormatError(
            f"shard set {self.shard_set} has {self.shards} shards, 0 to {self.shards - 1}; {kind} "
            f"{index} was requested"
        )


def canonical_text(content: Mapping[str, Any]) -> bytes:
    """Returns `content` as canonical JSON: one key per line, sorted, without spaces, pure ASCII.

    Raises  ValueError  a number is not finite, which JSON cannot express
    """

    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)

    lines = (f"{text(key)}:{text(content[key])}" for key in sorted(content))
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


# The shard-set id leaves out these fields: the same model, sharded the same way, is the same set,
# whoever built it, and whatever the name of the model's file.
_ABOUT = frozenset({"shard_set", "check", "provenance"})


def shard_set_id(content: Mapping[str, Any]) -> str:
    """Returns the XXH3-128, in hex, of the canonical text of `content` without `_ABOUT` keys."""
    rest = {key: value for key, value in content.items() if key not in _ABOUT}
    return str(xxhash.xxh3_128_hexdigest(canonical_text(rest)))


def manifest_check(content: Mapping[str, Any]) -> str:
    """Returns the XXH3-128, in hex, of the canonical text of `content` without its key `check`."""
    rest = {key: value for key, value in content.items() if key != "check"}
    return str(xxhash.xxh3_128_hexdigest(canonical_text(rest)))


def make_manifest(content: Mapping[str, Any]) -> Manifest:
    named = {**content, "shard_set": shard_set_id(content)}
    return parse_manifest(canonical_text({**named, "check": manifest_check(named)}))


def parse_manifest(text: bytes, where: str = MANIFEST) -> Manifest:
    """Parses and checks the manifest in `text`.

    Raises  ShardFormatError  the text is not JSON or not canonical, has another format version,
                              an unknown feature or an id that does not match the content, or
                              its fields contradict each other
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
            raise ValueError(f"expected a JSON object whose format is {FORMAT_NAME!r}")
        canonical, expected = canonical_text(content), shard_set_id(content)
        check = manifest_check(content)
    except (ValueError, RecursionError) as exc:
        raise ShardFormatError(
            f"{where} is not a manifest: {exc}. Build the shards again, or fetch a complete copy"
        ) from exc
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ShardFormatError(
            f"{where} has format version {version!r}; this dlm reads {FORMAT_VERSION}. "
            "Use the dlm that wrote it, or build the shards again"
        )
    features = content.get("features")
    unknown = (
        sorted(repr(f) for f in features if not isinstance(f, str) or f not in FEATURES)
        if isinstance(features, list)
        else ["(not a list)"]
    )
    if unknown:
        raise ShardFormatError(
            f"{where} needs features that this dlm does not know: {', '.join(unknown)}. "
            "Use a newer dlm"
        )
    if content.get("check") != check or content.get("shard_set") != expected or canonical != text:
        raise ShardFormatError(
            f"{where} says shard_set {content.get('shard_set')!r:.80} and check "
            f"{content.get('check')!r:.80}, which do not match its content: the manifest is "
            "damaged or was edited. Build the shards again, or fetch a complete copy"
        )
    try:
        return _manifest(content, text)
    except (KeyError, TypeError, ValueError) as exc:
        fault = f"the field {exc} is missing" if isinstance(exc, KeyError) else str(exc)
        raise ShardFormatError(
            f"{where} contradicts itself: {fault}. Build the shards again, or fetch a complete copy"
        ) from exc


_ID = re.compile(r"[0-9a-f]{32}")


def _number(value: Any, what: str, largest: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{what} is {value!r:.80}, not a whole number from 0 to {largest}")
    return value


def _digest(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError(f"{what} is {value!r:.80}, not 32 lower-case hexadecimal digits")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is {value!r:.80}, not a list")
    return value


def _manifest(content: Mapping[str, Any], text: bytes) -> Manifest:
    """Reads the fields of `content` and checks their types; raises ValueError or KeyError.

    Fields that are not named here are ignored; see "Versions" in FORMAT.md.
    """
    order = _number(content["order"], "order")
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order is {order}; expected 1 to {MAX_ORDER}")
    if content["encoding"] not in sorted(ENCODINGS):
        raise ValueError(
            f"encoding is {content['encoding']!r}; expected one of {sorted(ENCODINGS)}"
        )
    if type(content["unk_in_model"]) is not bool:
        raise ValueError(f"unk_in_model is {content['unk_in_model']!r:.80}, not true or false")
    if not isinstance(content["provenance"], dict):
        raise ValueError("provenance is not an object")
    files = []
    for position, entry in enumerate(_list(content["files"], "files")):
        kind = "shard" if position > 1 else ("vocabulary", "low_orders")[position]
        index = position - 2 if kind == "shard" else None
        if not isinstance(entry, dict) or (entry["kind"], entry["index"]) != (kind, index):
            raise ValueError(
                f"files[{position}] is {entry!r:.80}; expected the vocabulary, the low orders and "
                "the shards, in this order"
            )
        if entry["name"] != file_name(kind, index):
            raise ValueError(f"a file is named {entry['name']!r:.80}, not {file_name(kind, index)}")
        counted = (_number(entry[key], key) for key in ("ngrams", "blanks", "nodes"))
        files.append(
            FileEntry(
                kind,
                index,
                file_name(kind, index),
                _number(entry["bytes"], "bytes"),
                _digest(entry["xxh3_128"], "xxh3_128"),
                *counted,
            )
        )
    shards = len(files) - 2
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"{shards} shards were found; expected 1 to {MAX_SHARDS}")
    slots = [_number(slot, "a slot", shards - 1) for slot in _list(content["slots"], "slots")]
    if len(slots) != SLOTS:
        raise ValueError(f"{len(slots)} slots were found; expected {SLOTS}")
    manifest = Manifest(
        text=text,
        shard_set=_digest(content["shard_set"], "shard_set"),
        model=_digest(content["model"], "model"),
        order=order,
        counts=tuple(_number(n, "a count") for n in _list(content["counts"], "counts")),
        blanks=tuple(_number(n, "a count") for n in _list(content["blanks"], "blanks")),
        unk_in_model=content["unk_in_model"],
        encoding=content["encoding"],
        slots=np.array(slots, np.uint16),
        files=tuple(files),
        provenance=content["provenance"],
    )
    _check(manifest)
    return manifest


# Limits on the size of the low orders ("Files" in FORMAT.md): a file has headers, padding and
# spare 64-bit words; a word has a value, an entry, the directory of its list and two table
# entries; a 2-gram has a key, a value and a table entry.
_LAYOUT_BYTES = 1 << 16
_WORD_BYTES = 4 + 16 + 8 + 8
_PAIR_BYTES = 4 + 5 + 2 + 4


def _check(m: Manifest) -> None:
    if not len(m.counts) == len(m.blanks) == m.order:
        raise ValueError("counts and blanks must have one number per order")
    if m.vocabulary_size >= 1 << 32:
        raise ValueError(f"{m.vocabulary_size} words are too many: ids have only 32 bits")
    sizes = [count + blanks for count, blanks in zip(m.counts, m.blanks, strict=True)]
    if max(sizes) > MAX_NGRAMS:
        raise ValueError(
            f"{max(sizes)} n-grams of one order are too many; at most {MAX_NGRAMS} can be stored"
        )
    for order, (prefixes, ngrams) in enumerate(pairwise(sizes), 2):
        if ngrams > prefixes * m.vocabulary_size:
            raise ValueError(
                f"{ngrams} n-grams and blanks have order {order}, but {m.vocabulary_size} words "
                f"after {prefixes} prefixes make at most {prefixes * m.vocabulary_size}"
            )
    if m.blanks[0] != (0 if m.unk_in_model else 1):
        raise ValueError(
            f"{m.blanks[0]} of the 1-grams are blanks; expected 1 if the model lacks <unk>, else 0"
        )
    vocabulary, low = m.files[:2]
    words, pairs = sizes[0], sum(sizes[1:2])
    for entry, most in (
        (vocabulary, _LAYOUT_BYTES + words * (1 + MAX_WORD_BYTES)),
        (low, _LAYOUT_BYTES + words * _WORD_BYTES + pairs * _PAIR_BYTES),
    ):
        if entry.bytes > most:
            raise ValueError(
                f"{entry.name} has {entry.bytes} bytes; {words} words and {pairs} 2-grams need at "
                f"most {most}"
            )
    if (vocabulary.ngrams, vocabulary.blanks, vocabulary.nodes, low.nodes) != (0, 0, 0, 0):
        raise ValueError("the vocabulary must have no n-grams, and only shards may have nodes")
    for what, by_order, low_count, in_shards in (
        ("n-grams", m.counts, low.ngrams, sum(f.ngrams for f in m.files[2:])),
        ("blanks", m.blanks, low.blanks, sum(f.blanks for f in m.files[2:])),
    ):
        if (low_count, in_shards) != (sum(by_order[:2]), sum(by_order[2:])):
            raise ValueError(
                f"the low orders hold {low_count} {what} and the shards hold {in_shards}, but the "
                f"numbers per order are {list(by_order)}"
            )


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a shard set; raises ShardFormatError if it is missing or damaged."""
    path = directory / MANIFEST
    try:
        with _open_regular(path) as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
        if len(text) > MAX_MANIFEST_BYTES:
            raise ShardFormatError(
                f"{path} has more than {MAX_MANIFEST_BYTES:,} bytes, too many "
                "for a manifest. Fetch it again, or build the shards again"
            )
    except (FileNotFoundError, NotADirectoryError) as exc:
        if not directory.is_dir():
            found = "is a file" if directory.exists() else "does not exist"
            raise ShardFormatError(
                f"{directory} {found}; expected the folder of a shard set, with {MANIFEST} in it. "
                "Make one with: dlm shard MODEL.arpa --shards N --output DIR"
            ) from exc
        raise ShardFormatError(
            f"{directory} is not a shard set: it has no {MANIFEST}. "
            "Make one with: dlm shard MODEL.arpa --shards N --output DIR "
            "(a build that was interrupted leaves no manifest; run it again)"
        ) from exc
    return parse_manifest(text, str(path))


def _open_regular(path: Path) -> IO[bytes]:
    """Opens the file at `path` for reading; if it is a pipe, does not wait for a writer.

    Raises  ShardFormatError  the file is not a regular file, or cannot be opened
            FileNotFoundError, NotADirectoryError  the file is missing
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as exc:
        raise ShardFormatError(f"{path} cannot be opened: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardFormatError(
            f"{path} is not a regular file. Fetch it again, or build the shards again"
        )
    return os.fdopen(fd, "rb")


def file_checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def check_file(path: Path, entry: FileEntry, tick: Callable[[], object] = lambda: None) -> None:
    """Checks the size and checksum of a file that may be damaged, without mapping it.

    An unreadable page of a memory map ends the process, whereas a failed read raises an error.

    Args    tick  called every few megabytes
    Raises  ShardFormatError  the file is missing, unreadable, or has another size or checksum
    """
    digest = xxhash.xxh3_128()
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.bytes:
                raise _other_size(path, size, entry)
            while block := file.read(1 << 22):
                digest.update(block)
                tick()
    except FileNotFoundError as exc:
        raise _missing(path, entry) from exc
    except OSError as exc:
        raise ShardFormatError(
            f"{path} cannot be read: {exc.strerror}. Its disk may be failing (see dmesg); fetch "
            "the file again, to another disk"
        ) from exc
    if digest.hexdigest() != entry.xxh3_128:
        raise _other_checksum(path, digest.hexdigest(), entry)


def _other_size(path: Path, size: int, entry: FileEntry) -> ShardFormatError:
    return ShardFormatError(
        f"{path} has {size} bytes, but the manifest says {entry.bytes}: the file is truncated or "
        "from another build. Fetch it again, or build the shards again"
    )


def _missing(path: Path, entry: FileEntry) -> ShardFormatError:
    return ShardFormatError(
        f"{path} is missing; the manifest in its folder lists a file of this name with "
        f"{entry.bytes} bytes. Fetch it again, or build the shards again"
    )


def _other_checksum(path: Path, found: str, entry: FileEntry) -> ShardFormatError:
    return ShardFormatError(
        f"{path} has checksum {found}, but the manifest says {entry.xxh3_128}: the file is "
        "damaged. Fetch it again, or build the shards again"
    )


def map_columns(
    path: Path, entry: FileEntry, *, verify: bool = True, memory_options: MemoryOptions = MAPPED
) -> Arrays:
    """Maps one file; returns its columns as read-only arrays over the map.

    Args    verify  read the whole file once and compare its checksum; without it, only the size is
                    compared, and damage on disk can become a wrong score
    Raises  ConfigError       pages cannot be locked
            ShardFormatError  the file is missing, has another size or checksum, or other columns
    """
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.bytes or size == 0:
                raise _other_size(path, size, entry)
            mapped = hold(file, size, memory_options)
    except FileNotFoundError as exc:
        raise _missing(path, entry) from exc
    if verify:
        found = xxhash.xxh3_128_hexdigest(mapped)
        if found != entry.xxh3_128:
            raise _other_checksum(path, found, entry)
    try:
        return _columns(pa.py_buffer(mapped), entry.kind)
    except (pa.ArrowException, ValueError, OSError, KeyError, TypeError, IndexError) as exc:
        raise ShardFormatError(
            f"{path} is not a {entry.kind} file of a shard set: {exc}. "
            "Fetch it again, or build the shards again"
        ) from exc


def _columns(buffer: pa.Buffer, kind: str) -> Arrays:
    """Returns each column's values without copying `buffer`; faults raise various exceptions.

    Types are checked before the row is read, and every array must be in the buffer: a file that
    Arrow would have to decompress or convert is rejected.
    """
    reader = pa.ipc.open_file(buffer)
    schema = reader.schema
    wanted = {b"dlm.format_version": str(FORMAT_VERSION).encode(), b"dlm.kind": kind.encode()}
    if {key: (schema.metadata or {}).get(key) for key in wanted} != wanted:
        raise ValueError(f"the metadata is {schema.metadata}; expected {wanted}")
    if schema.names != list(COLUMNS[kind]):
        raise ValueError(f"the columns are {schema.names}; expected {list(COLUMNS[kind])}")
    for name, dtypes in COLUMNS[kind].items():
        found = schema.field(name).type
        allowed = [pa.from_numpy_dtype(dtype) for dtype in dtypes]
        if not pa.types.is_large_list(found) or found.value_type not in allowed:
            raise ValueError(f"column {name} has type {found}; expected a large_list of {allowed}")
    if reader.num_record_batches != 1:
        raise ValueError(f"found {reader.num_record_batches} record batches; expected 1")
    batch = reader.get_batch(0)
    batch.validate(full=True)
    if batch.num_rows != 1:
        raise ValueError(f"the record batch has {batch.num_rows} rows; expected 1")
    arrays: Arrays = {}
    for name in COLUMNS[kind]:
        column = batch.column(name)
        values = column.values
        if column.null_count or values.null_count:
            raise ValueError(f"column {name} has nulls")
        if column.offsets.to_pylist() != [0, len(values)]:
            raise ValueError(f"the offsets of column {name} do not cover all of its values")
        array = values.to_numpy(zero_copy_only=True)
        first = array.ctypes.data
        if array.nbytes and not (
            array.flags.aligned
            and buffer.address <= first
            and first + array.nbytes <= buffer.address + buffer.size
        ):
            raise ValueError(f"column {name} is compressed or not aligned")
        arrays[name] = array
    return arrays
