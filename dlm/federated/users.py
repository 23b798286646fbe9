"""Datasets keyed by user, read from disk one user at a time.

A file is sorted by user once into a *store*, an Arrow file with one row per user, which is then
read through a memory map. Both steps need only a bounded amount of memory.

The module has over 500 lines, since the rules for rows and the store's layout belong together.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dlm.errors import ConfigError, FormatError
from dlm.federated.counting.settings import MISSING
from dlm.files import replacing, scratch_folder, write_whole
from dlm.record.provenance import file_digest
from dlm.spill.text import sorted_rows

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "TOKENIZERS",
    "StoreFacts",
    "UserDataset",
    "spoken_words",
    "tokens_of",
    "words_of",
]

DEFAULT_MEMORY_BYTES = 256 << 20
BATCH_BYTES = 32 << 20  # bytes of text in one record batch of a store
STORE_VERSION = "2"
Encode = Callable[[list[str]], npt.NDArray[np.int32]]
Row = tuple[str, int, str]  # user id ("" where it is missing), 1-based line or row, text
COMPRESSIONS = {".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}


@dataclass(frozen=True)
class StoreFacts:
    """Counts of what a store contains, and of what was left out of it."""

    users: int
    utterances: int
    words: int  # split at white space, after the cap
    rows_without_user: int  # left out if `missing` is "count"
    users_without_text: int  # left out if `missing` is "count", too
    words_over_cap: int  # left out by `cap_words`


def words_of(utterance: str) -> list[str]:
    return utterance.split()


def tokens_of(
    utterances: Iterable[str],
    encode: Encode,
    *,
    cap: int | None = None,
    split: Callable[[str], list[str]] = words_of,
) -> list[npt.NDArray[np.int32]]:
    """Returns utterances as token ids, at most `cap` ids in total; leaves out empty utterances.
    `encode` gets the words that `split` returns, and gives their ids (see `Inventory.encode`)."""
    remaining = cap
    found = []
    for utterance in utterances:
        if remaining is not None and remaining <= 0:
            break
        ids = np.asarray(encode(split(utterance)), np.int32)[:remaining]
        if len(ids):
            found.append(ids)
            remaining = None if remaining is None else remaining - len(ids)
    return found


def check_columns(path: Path, user_column: str, text_column: str) -> None:
    """Raises FormatError unless a file of users' text has these columns."""
    rows = parquet_rows if ".parquet" in path.suffixes else tsv_rows
    next(rows(path, user_column, text_column), None)


def count_users(path: Path, user_column: str, text_column: str) -> int:
    """Counts, without sorting, the users with text that `UserDataset.open` would find in a file.

    Cost  one pass over the file; about 50 bytes of memory per user
    """
    rows = parquet_rows if ".parquet" in path.suffixes else tsv_rows
    found = {
        hash(user)
        for user, _, text in rows(path, user_column, text_column)
        if user and text.strip()
    }
    return len(found)


class _Letters(dict[int, int]):
    """Maps characters, on demand: keeps letters, marks and apostrophes; others become spaces."""

    def __missing__(self, code: int) -> int:
        keep = code == ord("'") or unicodedata.category(chr(code))[0] in "LM"
        self[code] = code if keep else ord(" ")
        return self[code]


_LETTERS = _Letters({ord("\u2019"): ord("'"), ord("\u2018"): ord("'")})


def spoken_words(utterance: str) -> list[str]:
    """Splits an utterance into words as in ASR: lower-case letters and inner apostrophes."""
    text = unicodedata.normalize("NFC", utterance).lower().translate(_LETTERS)
    return [word for part in text.split() if (word := part.strip("'"))]


# The values of `--tokenizer`.
TOKENIZERS: dict[str, Callable[[str], list[str]]] = {"words": spoken_words, "whitespace": words_of}


class UserDataset:
    """The text of some users, by index: user 0 has the smallest id.

    Create it with `open`, `from_tsv` or `from_parquet`; `select` and `split` give views of it.

    Guarantees
        the order of users does not depend on the order of rows; a user's utterances keep the order
        of the file; `digest` identifies the ids and the texts, as cut by the cap
    Cost    reading a user takes time in proportion to the text; memory grows by 8 bytes per user
    """

    def __init__(
        self,
        reader: pa.RecordBatchFileReader,
        found: StoreFacts,
        digest: str,
        rows: npt.NDArray[np.int64],
    ):
        self._reader = reader
        self._starts = _starts(reader)
        self._rows = rows
        self.facts = found
        self._digest = digest
        self._batch: tuple[int, Any] = (-1, None)

    @classmethod
    def open(cls, path: str | Path, **settings: Any) -> UserDataset:
        """Uses `from_parquet` if .parquet is one of the name's suffixes, else `from_tsv`."""
        parquet = ".parquet" in Path(path).suffixes
        return (cls.from_parquet if parquet else cls.from_tsv)(path, **settings)

    @classmethod
    def from_tsv(
        cls,
        path: str | Path,
        *,
        user_column: str = "user_id",
        text_column: str = "utterance",
        **settings: Any,
    ) -> UserDataset:
        """The users of a tab-separated file with a header, plain or .zst, .gz, .bz2.

        One utterance per line, UTF-8, no quoting. Other columns are ignored.

        Args
            store         folder to create and keep for later, readable only by its owner; None uses
                          a temporary one
            missing       what to do with rows without a user id and users without any text:
                          "refuse" (default) or "count": leave them out, but count them in `facts`
            cap_words     keep only this many of each user's first words; None keeps all
            memory_bytes  text in memory while sorting
        Raises
            FormatError   the header lacks the columns, a line has more or fewer fields, text is not
                          UTF-8, or `missing` refuses a row; the message names the line
        """
        source = Path(path)
        return cls._built(
            source,
            lambda: tsv_rows(source, user_column, text_column),
            f"tsv {user_column} {text_column}",
            **settings,
        )

    @classmethod
    def from_parquet(
        cls,
        path: str | Path,
        *,
        user_column: str = "user_id",
        text_column: str = "utterance",
        **settings: Any,
    ) -> UserDataset:
        """Like `from_tsv`, for a Parquet file; a null text counts as an empty one."""
        source = Path(path)
        return cls._built(
            source,
            lambda: parquet_rows(source, user_column, text_column),
            f"parquet {user_column} {text_column}",
            **settings,
        )

    @classmethod
    def _built(
        cls,
        source: Path,
        rows: Callable[[], Iterator[Row]],
        kind: str,
        *,
        store: str | Path | None = None,
        missing: str = "refuse",
        cap_words: int | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> UserDataset:
        if missing not in MISSING:
            raise ConfigError(f"missing={missing!r}; expected one of {', '.join(MISSING)}")
        if cap_words is not None and cap_words < 1:
            raise ConfigError(f"cap_words is {cap_words}; expected 1 or more words per user")
        if memory_bytes < 1 << 20:
            raise ConfigError(f"memory_bytes is {memory_bytes}; sorting needs at least 1 MiB")
        if source.is_dir():
            raise FormatError(f"{source} is a folder; expected a file of users' text")
        stat = source.stat()
        # This is the store's source; a store from another file or with other settings is rebuilt.
        made_from = (
            f"{STORE_VERSION} {kind} {missing} {cap_words} {stat.st_size} {stat.st_mtime_ns}"
        )
        place = scratch_folder(None, "dlm-users") if store is None else nullcontext(Path(store))
        with place as folder:
            file = folder / "users.arrow"
            opened = _opened(file, made_from)
            if opened is None:
                # A copy of users' text must be private, wherever it is.
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with scratch_folder(folder, "sort") as spill:
                    ordered = sorted_rows(named(source, rows(), missing), spill, memory_bytes)
                    _write_store(source, ordered, file, made_from, cap_words, missing)
                opened = _opened(file, made_from)
        # The map keeps the bytes of a temporary store whose folder was removed.
        assert opened is not None, "a store that was just written must open"
        reader, found, digest = opened
        return cls(reader, found, digest, np.arange(found.users, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._rows)

    def user_id(self, user: int) -> str:
        batch, row = self._place(user)
        return str(batch.column(0)[row].as_py())

    def user_ids(self) -> list[str]:
        return [self.user_id(user) for user in range(len(self))]

    def utterances(self, user: int) -> list[str]:
        """A user's utterances, in the order of the file."""
        batch, row = self._place(user)
        return list(batch.column(1)[row].as_py())

    def words(
        self,
        user: int,
        *,
        cap: int | None = None,
        split: Callable[[str], list[str]] = words_of,
    ) -> list[str]:
        """Returns a user's first `cap` words over all utterances; all words if `cap` is None."""
        found: list[str] = []
        for utterance in self.utterances(user):
            found += split(utterance)
            if cap is not None and len(found) >= cap:
                return found[:cap]
        return found

    def tokens(
        self,
        user: int,
        encode: Encode,
        *,
        cap: int | None = None,
        split: Callable[[str], list[str]] = words_of,
    ) -> list[npt.NDArray[np.int32]]:
        """Returns `tokens_of` for a user's utterances."""
        return tokens_of(self.utterances(user), encode, cap=cap, split=split)

    def word_counts(self) -> npt.NDArray[np.int64]:
        """The number of words of each user, split at white space."""
        return np.array([len(self.words(user)) for user in range(len(self))], np.int64)

    def select(self, users: Sequence[int] | npt.NDArray[np.integer[Any]]) -> UserDataset:
        """A view of these users, in this order."""
        places = np.asarray(users, np.int64)
        if len(places) and not (places.min() >= 0 and places.max() < len(self)):
            raise ConfigError(
                f"user indexes are {places.min()} to {places.max()}; expected 0 to {len(self) - 1}"
            )
        if len(np.unique(places)) != len(places):
            raise ConfigError("a user was given twice; a view can contain each user only once")
        return UserDataset(self._reader, self.facts, self._digest, self._rows[places])

    def split(self, fraction: float, *, name: str = "split") -> tuple[UserDataset, UserDataset]:
        """Returns (the rest, about `fraction` of the users), split by a hash of name and user id.

        A user's side depends only on `name` and the user's id, so it does not change when other
        users are added or removed; different names give independent splits.
        """
        if not 0 <= fraction <= 1:
            raise ConfigError(f"the fraction is {fraction}; expected 0 to 1")
        held = np.array(
            [_hash01(name, self.user_id(user)) < fraction for user in range(len(self))], bool
        )
        return self.select(np.flatnonzero(~held)), self.select(np.flatnonzero(held))

    @property
    def digest(self) -> str:
        """A hash of the ids and texts of this view's users, compared when a run resumes."""
        if len(self._rows) == self.facts.users and bool(
            np.array_equal(self._rows, np.arange(self.facts.users))
        ):
            return self._digest
        return hashlib.blake2b(
            self._digest.encode() + self._rows.astype("<i8").tobytes(), digest_size=16
        ).hexdigest()

    def _place(self, user: int) -> tuple[Any, int]:
        if not 0 <= user < len(self):
            raise IndexError(f"user {user} is out of range; expected 0 to {len(self) - 1}")
        row = int(self._rows[user])
        index = int(np.searchsorted(self._starts, row, "right")) - 1
        if self._batch[0] != index:
            self._batch = (index, self._reader.get_batch(index))
        return self._batch[1], row - int(self._starts[index])


def _hash01(name: str, user: str) -> float:
    raw = hashlib.blake2b(user.encode(), key=hashlib.sha256(name.encode()).digest(), digest_size=8)
    return (int.from_bytes(raw.digest(), "little") >> 11) / float(1 << 53)


def _starts(reader: pa.RecordBatchFileReader) -> npt.NDArray[np.int64]:
    rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])[: max(len(rows), 1)].astype(
        np.int64
    )


def _opened(file: Path, made_from: str) -> tuple[pa.RecordBatchFileReader, StoreFacts, str] | None:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        facts = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
        side = (file.parent / "users.facts").read_text(encoding="utf-8").splitlines()
        if facts.get("made_from") != made_from or side[0] != made_from:
            return None
        if file_digest(file) != side[3]:
            return None  # damaged, or changed since it was written, so an id may be wrong
        return reader, StoreFacts(*(int(n) for n in side[1].split())), side[2]
    except (OSError, pa.ArrowInvalid, IndexError, ValueError, TypeError):
        return None


SCHEMA = pa.schema([("user_id", pa.string()), ("utterances", pa.list_(pa.string()))])


def _write_store(
    source: Path,
    rows: Iterator[Row],
    file: Path,
    made_from: str,
    cap_words: int | None,
    missing: str,
) -> None:
    """Groups rows, sorted by user, into a store, and writes the store's facts last."""
    side = file.parent / "users.facts"
    side.unlink(missing_ok=True)
    digest = hashlib.blake2b(digest_size=16)
    users = utterances = words = over = without_user = without_text = 0
    pending: list[tuple[str, list[str]]] = []
    pending_bytes = 0
    schema = SCHEMA.with_metadata({"made_from": made_from})

    # The file replaces an old one when complete; processes that have the old one open keep it.
    with replacing(file, mode=0o600) as place, pa.ipc.new_file(place, schema) as writer:

        def flush() -> None:
            nonlocal pending, pending_bytes
            if pending:
                ids, texts = zip(*pending, strict=True)
                writer.write_batch(
                    pa.record_batch(
                        [pa.array(ids, pa.string()), pa.array(texts, pa.list_(pa.string()))],
                        schema=schema,
                    )
                )
            pending, pending_bytes = [], 0

        def end_user(user: str, line: int, texts: list[str]) -> None:
            nonlocal users, without_text, pending_bytes
            if not texts:
                if missing == "refuse":
                    raise FormatError(
                        f"{source}: the user on line {line} has no text; remove that user's rows "
                        'or pass missing="count" (--missing count) to leave such users out'
                    )
                without_text += 1
                return
            users += 1
            pending.append((user, texts))
            pending_bytes += sum(map(len, texts)) + len(user)
            digest.update(b"u%d:" % len(user.encode()) + user.encode())
            for text in texts:
                raw = text.encode()
                digest.update(b"t%d:" % len(raw) + raw)
            if pending_bytes >= BATCH_BYTES:
                flush()

        now: str | None = None
        first_line, remaining = 0, cap_words
        texts: list[str] = []
        for user, line, text in rows:
            if not user:  # rows without a user sort first; `named` refuses them or lets them pass
                without_user += 1
                continue
            if user != now:
                if now is not None:
                    end_user(now, first_line, texts)
                now, first_line, remaining, texts = user, line, cap_words, []
            found = text.split()
            if not found:
                continue
            if remaining is not None:
                over += max(len(found) - remaining, 0)
                if remaining == 0:
                    continue
                if len(found) > remaining:
                    found, text = found[:remaining], " ".join(found[:remaining])
                remaining -= len(found)
            utterances += 1
            words += len(found)
            texts.append(text)
        if now is not None:
            end_user(now, first_line, texts)
        flush()
        if not users:
            raise FormatError(f"{source} has no user with text; expected at least one")
    facts = f"{users} {utterances} {words} {without_user} {without_text} {over}"
    lines = (made_from, facts, digest.hexdigest(), file_digest(file))
    write_whole(side, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)


def _raw(path: Path) -> Any:
    compression = COMPRESSIONS.get(path.suffix)
    stream = pa.OSFile(str(path), "rb")
    return stream if compression is None else pa.CompressedInputStream(stream, compression)


def _lines(path: Path) -> Iterator[bytes]:
    """Yields lines without their newlines; keeps white space inside a line, such as U+2028."""
    rest: list[bytes] = []  # parts of an incomplete line, joined only once
    with _raw(path) as stream:
        while block := stream.read(1 << 20):
            first, *more = block.split(b"\n")
            rest.append(first)
            if more:
                yield b"".join(rest)
                yield from more[:-1]
                rest = [more[-1]]
    if last := b"".join(rest):
        yield last


def tsv_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    try:
        yield from _tsv_rows(path, user_column, text_column)
    except pa.ArrowException as exc:
        raise FormatError(f"{path} cannot be decompressed: {exc}. Copy the file again") from exc
    except OSError as exc:
        if exc.errno is not None:
            raise
        raise FormatError(f"{path} cannot be decompressed: {exc}. Copy the file again") from exc


def _tsv_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    lines = _lines(path)
    header = next(lines, b"").rstrip(b"\r").removeprefix(b"\xef\xbb\xbf")
    names = header.decode("utf-8", "replace").split("\t")
    if header and len(names) == 1:
        raise FormatError(
            f"{path} is not tab-separated: its first line has no tab. CSV and JSONL are not "
            "supported; convert the file to Parquet, or to TSV with the header "
            f"{user_column}<TAB>{text_column}"
        )
    for column in (user_column, text_column):
        if names.count(column) != 1:
            # The first line is not shown: in a file without a header, it is a user's text.
            raise FormatError(
                f"{path}: the first line has {len(names)} columns; expected a header with "
                f"{column!r} exactly once (--user-column, --text-column)"
            )
    user_at, text_at = names.index(user_column), names.index(text_column)
    for number, raw in enumerate(lines, 2):
        try:
            fields = raw.rstrip(b"\r").decode("utf-8").split("\t")
        except UnicodeDecodeError as exc:
            raise FormatError(
                f"{path}, line {number}: byte {exc.start} of the line is not UTF-8; "
                "convert the file (iconv -t UTF-8)"
            ) from exc
        if len(fields) != len(names):
            raise FormatError(
                f"{path}, line {number}: the line has {len(fields)} fields, but the header has "
                f"{len(names)}; fix the line, or remove it"
            )
        yield fields[user_at].strip(), number, fields[text_at]


def parquet_rows(path: Path, user_column: str, text_column: str) -> Iterator[Row]:
    """Yields the rows of a Parquet file; if the whole file is compressed, unpacks it in memory."""
    try:
        if path.suffix in COMPRESSIONS:
            with _raw(path) as stream:
                file = pq.ParquetFile(pa.BufferReader(stream.read_buffer()))
        else:
            file = pq.ParquetFile(str(path), memory_map=True)
        names = file.schema_arrow.names
        for column in (user_column, text_column):
            if names.count(column) != 1:
                raise FormatError(
                    f"{path} has the columns {', '.join(names[:8])}; expected {column!r} exactly "
                    "once (--user-column, --text-column)"
                )
        number = 0
        for batch in file.iter_batches(8192, columns=[user_column, text_column]):
            ids = batch.column(batch.schema.get_field_index(user_column)).to_pylist()
            texts = batch.column(batch.schema.get_field_index(text_column)).to_pylist()
            for user, text in zip(ids, texts, strict=True):
                number += 1
                if text is not None and not isinstance(text, str):
                    raise FormatError(
                        f"{path}, row {number}: the text has type {type(text).__name__}; expected "
                        "a column of strings (--text-column)"
                    )
                yield _user_id(user, path, number), number, text or ""
    except pa.ArrowException as exc:
        raise FormatError(
            f"{path} is not a Parquet file, or is damaged: {exc}. Copy the file again"
        ) from exc


def _user_id(value: Any, path: Path, row: int) -> str:
    """Returns a user id as text; "" for a missing id, such as NaN after a join of numeric ids."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise FormatError(
                f"{path}, row {row}: the user id is not UTF-8; fix the row, or remove it"
            ) from exc
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise FormatError(
            f"{path}, row {row}: the user id {value!r} has type {type(value).__name__}; expected "
            "text or a whole number, since ids of other types may not tell users apart"
        )
    return str(value).strip()


def named(source: Path, rows: Iterable[Row], missing: str) -> Iterator[Row]:
    for row in rows:
        if not row[0] and missing == "refuse":
            raise FormatError(
                f"{source}, line {row[1]}: the row has no user id; fix the row, or pass --missing "
                'count (in a configuration: missing = "count") to leave such rows out'
            )
        yield row
