"""Fetches objects into this machine's cache folder, several parts at once. Parts that a killed
process fetched are not fetched again, and only one of several processes fetches an object."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash

from dlm.errors import ConfigError, FormatError, UnavailableError
from dlm.files import claim, evict, locked, move, naming, release, write_whole
from dlm.logs import EventLog
from dlm.progress import ProgressReporter, Tell
from dlm.resources import cache_folder, in_order, parse_size
from dlm.stores.remote import SHA256, XXH3, RemotePath, call, head, opened, telling

log = EventLog(__name__)

PART_BYTES = 8 << 20
AT_ONCE = 8
NAMES = r"[0-9a-f]{32}"  # names of the cache's folders, each for one object or one shard set
WAITING = "another process is fetching the same file; waiting for that process"
_DIGESTS: dict[str, Callable[[], Any]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}


def home() -> Path:
    return cache_folder() / "stores"


def bound(folder: Path, names: str) -> None:
    """Removes a cache's folders that are not in use, the least recently used first, until the
    cache fits in $DLM_CACHE_SIZE."""
    size = os.environ.get("DLM_CACHE_SIZE")
    evict(folder, names, most_bytes=parse_size(size) if size else math.inf)


def let_go(folder: Path) -> None:
    """Notes that this process no longer uses a folder of the cache."""
    if folder.parent == home():
        release(folder)
        bound(home(), NAMES)


def folder_of(*key: str) -> Path:
    """A folder of the cache, for content with this key; it is in use until this process ends."""
    found = home() / _digest(*key)
    found.mkdir(parents=True, exist_ok=True)
    while not claim(found):  # another process has just removed it
        found.mkdir(parents=True, exist_ok=True)
    return found


def _digest(*key: str) -> str:
    return hashlib.blake2b("\0".join(key).encode(), digest_size=16).hexdigest()


def _log(line: str) -> None:
    log.warning("store.cached", extra={"reason": line})


def remembered(kind: str, place: RemotePath, look: Callable[[], str], tell: Tell = _log) -> str:
    """Returns what `look` finds about a URL or, if the store is unavailable, what it last found."""
    file = home() / f"{_digest(kind, str(place))}.found"
    try:
        found = look()
    except UnavailableError as exc:
        if not file.is_file():
            raise
        tell(f"{exc}. Going on with the copy in {home()}")
        return file.read_text()
    file.parent.mkdir(parents=True, exist_ok=True)
    if not (file.is_file() and file.read_text() == found):
        write_whole(file, found.encode())
    return found


def fetch_object(place: RemotePath, tell: Tell = lambda line: None) -> Path:
    """Returns the cached file of an object, fetched if needed; a new file if the object changed.
    Raises ConfigError, FormatError, AuthenticationError, UnavailableError, FileNotFoundError."""

    def look() -> str:
        version, size, attributes = call(head, place)
        return json.dumps([version, size, {kind: attributes.get(kind) for kind in _DIGESTS}])

    version, size, digests = json.loads(remembered("object", place, look, tell))
    path = folder_of(str(place), version) / place.name

    def check(file: Path) -> None:
        for kind, digest in digests.items():
            with file.open("rb") as read:
                found = digest and hashlib.file_digest(read, _DIGESTS[kind]).hexdigest()
            if found != digest:
                raise FormatError(
                    f"{place} was fetched, but its {kind} is {found}; expected {digest}. Fetch it "
                    "again, or push it again"
                )

    fetch(place, path, size, check, tell)
    return path


def fetch(
    place: RemotePath,
    path: Path,
    size: int,
    check: Callable[[Path], None],
    tell: Tell = lambda line: None,
) -> None:
    """Fetches an object to `path`, unless that exists.

    Args    check  raises the error for a damaged file, which is then removed
    Raises  FormatError  the object has another size;  ConfigError  the disk refuses it; and what
            `fetch_object` raises
    """
    if path.exists():
        return
    progress = ProgressReporter(tell)
    try:
        with locked(path.with_name(f".{path.name}.lock"), tell=lambda: tell(WAITING)):
            if not path.exists():
                progress.stage(f"fetching {place}", size >> 20, "MB")
                part = path.with_name(f".{path.name}.part")
                call(fetch_parts, place, part, size, progress.step)
                try:
                    check(part)
                except BaseException:
                    _remove(part)
                    raise
                move(part, path)
                _journal(part).unlink()
                bound(home(), NAMES)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and exc.filename == str(place):
            raise
        raise ConfigError(
            f"{place} cannot be cached in {path.parent}: {exc}. Free space there, or set "
            "DLM_CACHE_DIR to another folder"
        ) from exc


def _journal(part: Path) -> Path:
    return part.with_suffix(".parts")


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
    _journal(part).unlink(missing_ok=True)


def fetch_parts(
    place: RemotePath, part: Path, size: int, step: Callable[[int], None] = lambda done: None
) -> None:
    """Fetches an object into a file. The file's journal has the object's version, and the numbers
    of the parts that are on disk."""
    version, found, _ = head(place)
    if found != size:
        raise FormatError(f"{place} has {found} bytes; expected {size}. Push it again")
    try:
        known, *done = _journal(part).read_text().split("\n")
    except FileNotFoundError:
        known, done = "", []
    if known != version or not part.exists():
        _remove(part)
        done = []
    with ExitStack() as stack, naming(part):
        file = stack.enter_context(part.open("r+b" if done else "wb"))
        journal = stack.enter_context(_journal(part).open("a" if done else "w"))
        if not done:
            try:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
                file.truncate(size)
            except OSError:
                _remove(part)  # frees the space reserved so far
                raise
            journal.write(version)
        whole = {int(one) for one in done if one.isdigit()}
        step(min(len(whole) * PART_BYTES, size) >> 20)
        missing = [n for n in range(-(-size // PART_BYTES)) if n not in whole]
        pool = ThreadPoolExecutor(AT_ONCE)
        stack.callback(pool.shutdown, cancel_futures=True)

        def get(number: int) -> int:
            begin = number * PART_BYTES
            data = _range(place, version, begin, min(begin + PART_BYTES, size))
            os.pwrite(file.fileno(), data, begin)
            return number

        for number in in_order((pool.submit(get, one) for one in missing), 2 * AT_ONCE):
            journal.write(f"\n{number}")
            journal.flush()
            step(PART_BYTES >> 20)
        os.fsync(file.fileno())


def _range(place: RemotePath, version: str, begin: int, end: int) -> bytes:
    import obstore
    from obstore.exceptions import PreconditionError

    options: dict[str, object] = {"range": (begin, end)}
    if version.startswith('"'):  # not a weak version
        options["if_match"] = version
    with telling(place):
        try:
            store = opened(place.scheme, place.root)
            found = obstore.get(store, place.key, options=options).bytes()  # type: ignore[arg-type]
        except PreconditionError:
            raise FormatError(f"{place} changed while it was read; fetch it again") from None
    if len(found) != end - begin:
        raise FormatError(
            f"{place}: only {len(found)} of {end - begin} bytes arrived; fetch it again"
        )
    return found  # type: ignore[return-value]
