"""Pushes shard sets to stores, with the manifest last, and fetches as much of a set as is needed
into the cache folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dlm.errors import AuthenticationError, ConfigError, ShardFormatError, UnavailableError
from dlm.files import write_whole
from dlm.index.layout import (
    MANIFEST,
    Manifest,
    check_file,
    file_checksum,
    parse_manifest,
    read_manifest,
)
from dlm.progress import ProgressReporter, Tell
from dlm.record.signature import require_signed, signature_of
from dlm.stores.fetching import fetch, fetch_object, folder_of, remembered
from dlm.stores.remote import XXH3, AnyPath, RemotePath, call, head, put, put_file

PUSHED = f"{MANIFEST}.pushed"  # this object names the set that owns the URL
FOLLOWED = (".toml", ".sets")  # suffixes of files that commands change in place


def cached_set(place: RemotePath, tell: Tell = lambda line: None) -> tuple[Path, Manifest]:
    """Returns the cache folder and the manifest of the shard set at a URL. Raises ShardFormatError,
    ConfigError, AuthenticationError, UnavailableError."""

    def look() -> str:
        try:
            return str((place / MANIFEST).read_bytes(fresh=True), "utf-8", "replace")
        except FileNotFoundError as exc:
            raise ShardFormatError(
                f"{place} is not a shard set: it has no {MANIFEST}. Push one there with: dlm push "
                "DIR URL (an interrupted push leaves no manifest; run it again)"
            ) from exc

    text = remembered("shard set", place, look, tell)
    manifest = parse_manifest(text.encode(), f"{place}/{MANIFEST}")
    folder = folder_of("shard set", text)
    if not (folder / MANIFEST).exists():
        write_whole(folder / MANIFEST, manifest.text)
    return folder, manifest


def fetch_set(
    place: RemotePath,
    shards: Sequence[int] | None = None,
    *,
    public_key: Path | None = None,
    tell: Tell = lambda line: None,
) -> Path:
    """Fetches a shard set, or as much of it as a server of these shards needs, and verifies it.
    Returns the set's folder in the cache.

    Args    public_key  PEM file of the key that must have signed what is fetched
    Raises  what `cached_set` raises;  FormatError, PrivacyError  the set is not signed by that key
    """
    folder, manifest = cached_set(place, tell)
    for entry in manifest.files:
        if shards is None or entry.index is None or entry.index in shards:
            check = partial(check_file, entry=entry)
            try:
                fetch(place / entry.name, folder / entry.name, entry.bytes, check, tell)
            except FileNotFoundError as exc:
                raise ShardFormatError(
                    f"{place / entry.name} is missing, but the manifest lists it; push the set "
                    "again"
                ) from exc
    signature = signature_of(folder / MANIFEST)
    if public_key is not None or shards is None:
        try:
            write_whole(signature, (place / signature.name).read_bytes())
        except (AuthenticationError, UnavailableError):
            if public_key is not None and not signature.exists():
                raise
        except FileNotFoundError as exc:
            if public_key is not None:
                raise ConfigError(
                    f"{place} has no {signature.name}, so it is not signed; sign the set with dlm "
                    "privacy sign, and push it again"
                ) from exc
    if public_key is not None:
        require_signed(folder / MANIFEST, public_key, partly=True)
    return folder


def local_set(named: AnyPath, tell: Tell = lambda line: None) -> Path:
    """Returns the folder of a complete shard set, which is fetched if `named` is a URL."""
    return fetch_set(named, tell=tell) if isinstance(named, RemotePath) else named


def local_model(named: AnyPath, tell: Tell = lambda line: None) -> Path:
    """Returns the folder or file of a model, which is fetched if `named` is a URL. Raises what
    `fetch_set` and `fetch_object` raise; ConfigError if the URL has neither a set nor a file."""
    if not isinstance(named, RemotePath):
        return named
    try:
        return fetch_set(named, tell=tell)
    except (AuthenticationError, UnavailableError):
        pass  # a store may deny access to a missing set; if it is down, a file may be cached
    except ShardFormatError as exc:
        if not isinstance(exc.__cause__, FileNotFoundError):
            raise
    try:
        return fetch_object(named, tell)
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{named} is not a model: there is neither an object of this name nor a {MANIFEST} "
            "below it"
        ) from exc


def manifest_of(named: AnyPath) -> Manifest:
    """The manifest of the set in a folder or at a URL."""
    return cached_set(named)[1] if isinstance(named, RemotePath) else read_manifest(named)


def push_set(folder: Path, place: RemotePath, tell: Tell = lambda line: None) -> bool:
    """Pushes a shard set, except files that an earlier push wrote; returns whether it wrote any.
    Raises ConfigError if the URL has another set, or part of one; ShardFormatError if a file is
    damaged."""
    manifest, there = read_manifest(folder), place / MANIFEST
    # The first push owns the URL: a mixture of two sets' files would be useless.
    mine, claim = manifest.shard_set.encode(), place / PUSHED
    if not call(put, claim, mine, {}) and _found(claim) != mine:
        raise _another(place, folder)
    found, progress, pushed = _found(there), ProgressReporter(tell), False
    if found is not None and parse_manifest(found).shard_set != manifest.shard_set:
        raise _another(place, folder)
    for entry in manifest.files:
        progress.stage(f"pushing {place / entry.name}: {entry.bytes >> 20} MB")
        check_file(folder / entry.name, entry)
        pushed |= _push(folder / entry.name, place / entry.name, entry.xxh3_128)
    signature = signature_of(folder / MANIFEST)
    if signature.exists() and _found(place / signature.name) != signature.read_bytes():
        pushed = bool(call(put, place / signature.name, signature.read_bytes()))
    return bool(found is None and call(put, there, manifest.text, {})) or pushed


def push_file(file: Path, place: RemotePath) -> bool:
    """Pushes a model's file, or replaces cluster.toml or a list of shard sets; returns whether the
    URL's content changed. Raises ConfigError if the URL has another model's file."""
    if place.suffix not in FOLLOWED:
        return _push(file, place, file_checksum(file))
    content, before = file.read_bytes(), _found(place)
    if not place.replace(content, "dlm push"):
        raise ConfigError(f"another process changed {place} during the push; push the file again")
    return content != before


def _push(file: Path, place: RemotePath, digest: str) -> bool:
    found = _digest(place)
    if found == digest:
        return False
    if found is not None:
        raise _another(place, file)
    call(put_file, place, file, digest)
    return True


def _another(place: RemotePath, than: Path) -> ConfigError:
    return ConfigError(
        f"{place} exists with content that differs from {than}; push each model to a separate "
        "place, or remove what an interrupted push left there"
    )


def _digest(place: RemotePath) -> str | None:
    """Returns the digest of the object at a URL, "" if it is unknown; None if no object exists."""
    try:
        return str(call(head, place)[2].get(XXH3, ""))
    except FileNotFoundError:
        return None


def _found(place: RemotePath) -> bytes | None:
    try:
        return place.read_bytes(fresh=True)
    except FileNotFoundError:
        return None
