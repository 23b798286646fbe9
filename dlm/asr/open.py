"""Opens a model by name: servers, a shard set on disk, or an ARPA file.

    client = open_model("cluster.toml")
    client = open_model("shards/model")     # a shard set, in this process
    client = open_model("model.binary")     # a file of KenLM's build_binary, read in place
    client = open_model("model.arpa.zst")   # sharded once, into the cache; then as above
    client = open_model("remote.bin")       # a pointer file
    client = open_model("hf://ORG/NAME/en.arpa.bin")  # fetched once; also s3:// gs:// az:// https://

A pointer file, for programs that accept only a file as a model, has one line, `dlm://PLACE`. PLACE
is `HOST:PORT[,HOST:PORT...]`, or a path, which begins with `/`, `./`, `../` or `~/`, to any of the
above. Append `?model=e346a2` to choose among the servers' models. Paths are relative to the folder
of the pointer file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlm.client import Client, ClientConfig
from dlm.client.config import check_address
from dlm.errors import ArpaError, ConfigError
from dlm.files import claim, locked
from dlm.index.layout import FORMAT_VERSION, MANIFEST
from dlm.index.making.shard_set import KERNELS, build_shard_set
from dlm.index.making.work import describe_input
from dlm.index.placed import local_model
from dlm.jit import compile_ahead
from dlm.kenlm.layout import is_kenlm_file
from dlm.logs import EventLog
from dlm.ngram.arpa import ArpaReader, is_parts_folder
from dlm.progress import ProgressReporter, Tell
from dlm.resources import cache_folder
from dlm.stores.fetching import bound
from dlm.stores.remote import AnyPath, RemotePath, located
from dlm.units import counted

__all__ = ["open_model"]

log = EventLog(__name__)

SCHEME = "dlm://"
POINTER_BYTES = 4096  # maximum size of a pointer file
FORMS = (
    "cluster.toml, the folder of a shard set, an ARPA file, a KenLM binary file, the URL of one of "
    "these in a store, or dlm://HOST:PORT"
)
_POINTER = re.compile(r"dlm://(?P<place>[^?]+)(?:\?model=(?P<model>[0-9a-f]{6,}))?")
_IS_PATH = ("/", "./", "../", "~/")
_SET = r".+-[0-9a-f]{16}-[0-9a-f]{16}"
WAITING = "another process is sharding this file; waiting for it"

SERVERS, CLUSTER, SHARD_SET, ARPA = "servers", "cluster", "shard set", "ARPA"
KENLM = "KenLM"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: `kind` is SERVERS, CLUSTER, SHARD_SET, ARPA or KENLM, and `model`
    the beginning of the id of one of the servers' models, or None for their default."""

    kind: str
    path: AnyPath | None = None
    addresses: tuple[str, ...] = ()
    model: str | None = None


def open_model(
    named: str | bytes | os.PathLike[str],
    *,
    config: ClientConfig | None = None,
    model: str | None = None,
    tell: Tell | None = None,
    vocab: str | os.PathLike[str] | None = None,
) -> Client:
    """Opens a client of the model that `named` refers to.

    Args
        config  for a client of servers; ignored for a shard set in this process
        model   which of the servers' models, see `Client.connect`; overrides a pointer's choice
        tell    gets lines about the progress of sharding
        vocab   path of a list of words, for a KenLM file that stores none (`build_binary -v`)
    Raises
        ConfigError  no such model, an empty or irregular file, or a cache that is not writable
        ArpaError, KenlmFormatError, ShardFormatError  the file is damaged, or not an ARPA file
        UnavailableError, AuthenticationError, ProtocolError  see `Client.connect`
    Guarantees
        An ARPA file is sharded when it is new or has changed; its shard set is kept in the cache
        ($DLM_CACHE_DIR, or dlm in the user's cache folder). If several processes open it at once,
        one shards it, the others wait. A KenLM file is scored in place, as by KenLM, bit for bit.
    """
    source = find_source(named, tell or (lambda line: None))
    if vocab is not None and source.kind != KENLM:
        raise ConfigError(
            f"vocab={os.fspath(vocab)} was given, but {os.fsdecode(named)} is not a KenLM binary "
            "file; models of other kinds contain their words. Leave out `vocab`"
        )
    if source.kind == SERVERS:
        return Client.connect(list(source.addresses), config, model=model or source.model)
    assert source.path is not None
    if source.kind == CLUSTER or isinstance(source.path, RemotePath):
        return Client.connect(source.path, config, model=model or source.model)
    if model or source.model:
        raise ConfigError(
            f"model {model or source.model!r} was chosen, but {source.path} has only one model; "
            "omit this choice (`model` or ?model=), since only servers can have several models"
        )
    if source.kind in (SHARD_SET, KENLM):
        return Client.local(source.path, vocab=vocab)
    return Client.local(sharded(source.path, tell=tell), verify=False)  # dlm wrote the files


def find_source(
    named: str | bytes | os.PathLike[str], tell: Tell = lambda line: None
) -> ModelSource:
    """Finds what `named` refers to; reads the beginning of a file, or fetches a stored model."""
    if not isinstance(named, (str, bytes, os.PathLike)):
        raise ConfigError(f"the model name is {named!r}; expected a path or a URL: {FORMS}")
    text = os.fsdecode(named)
    if text.startswith(SCHEME):
        return _pointed(text, Path(), "the name")
    if not text:
        raise ConfigError(f"the model name is an empty string; expected {FORMS}")
    place = located(text)
    if isinstance(place, RemotePath) and place.suffix == ".toml":
        return ModelSource(CLUSTER, place)
    path = local_model(place, tell)
    if _is_pointer(path):
        return _pointed(_read_pointer(path), path.parent, str(path))
    return _of_path(path)


def _of_path(path: Path) -> ModelSource:
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return ModelSource(SHARD_SET, path)
        if is_parts_folder(path):
            return ModelSource(ARPA, path)
        found = "is a folder without a manifest" if any(path.iterdir()) else "is an empty folder"
        raise ConfigError(f"{path} {found}; expected {FORMS}. `dlm shard` makes shard sets")
    if not path.exists():
        raise ConfigError(f"no such file or folder: {path}; expected {FORMS}")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file; expected {FORMS}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path} cannot be read: permission denied; check its permissions")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty; expected {FORMS}")
    if is_kenlm_file(path):
        return ModelSource(KENLM, path)
    return ModelSource(CLUSTER if path.suffix == ".toml" else ARPA, path)


def _is_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(SCHEME)) == SCHEME.encode()
    return False


def _read_pointer(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(POINTER_BYTES + 1)
    lines = content.decode("utf-8", "replace").strip().splitlines()
    if len(content) > POINTER_BYTES or len(lines) != 1:
        raise ConfigError(
            f"{path} is a pointer file with {counted(len(lines), 'line')}; expected one line, "
            f"dlm://..., and at most {POINTER_BYTES} bytes"
        )
    return lines[0]


def _pointed(text: str, folder: Path, where: str) -> ModelSource:
    """Finds what a pointer refers to; rejects a pointer to a pointer, so there are no cycles."""
    match = _POINTER.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{where} says {text!r}; expected dlm://HOST:PORT[,HOST:PORT...] or dlm:///PATH, "
            "optionally followed by ?model= and at least 6 hex digits to choose a model"
        )
    place, model = match["place"], match["model"]
    if not place.startswith(_IS_PATH):
        addresses = tuple(place.split(","))
        for address in addresses:
            try:
                check_address(address)
            except ConfigError as exc:
                raise ConfigError(
                    f"{where} says {text!r}: {exc}. A path begins with /, ./, ../ or ~/"
                ) from exc
        return ModelSource(SERVERS, addresses=addresses, model=model)
    path = folder / Path(place).expanduser()
    if _is_pointer(path):
        raise ConfigError(
            f"{where} refers to {path}, which is also a pointer file; expected {FORMS}"
        )
    try:
        found = _of_path(path)
    except ConfigError as exc:
        raise ConfigError(f"{where} says {text!r}: {exc}") from exc
    return ModelSource(found.kind, found.path, model=model)


def copy_model(named: str | os.PathLike[str], folder: Path) -> None:
    """Puts a model into a folder as a file: a copy, or a pointer to servers or shards."""
    source = find_source(named)
    if source.kind in (ARPA, KENLM) and source.path is not None and source.path.is_file():
        shutil.copy2(source.path, folder)
        return
    place = ",".join(source.addresses) if source.path is None else str(source.path.resolve())
    chosen = f"?model={source.model}" if source.model else ""
    (folder / "model.bin").write_text(f"{SCHEME}{place}{chosen}\n", encoding="utf-8")


def sharded(arpa: Path, *, cache_dir: Path | None = None, tell: Tell | None = None) -> Path:
    """Returns the folder of an ARPA file's shard set in the cache; makes the set if it is missing.

    If the cache exceeds $DLM_CACHE_SIZE, the least recently opened sets are removed, except sets
    that a running process has open. Raises ArpaError, ConfigError.
    """
    home = (cache_folder() if cache_dir is None else cache_dir) / "models"
    key = _key(arpa)
    folder = home / "-".join(key)
    if _opened(folder):
        bound(home, _SET)
        return folder
    # Errors in the file are reported before anything is compiled or written.
    with ArpaReader(arpa):
        pass
    progress = ProgressReporter(tell or (lambda line: None))
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = home / f"{key[0]}-{key[1]}.lock"
        with locked(lock, tell=partial(progress.stage, WAITING), remove=True):
            if _opened(folder):  # another process sharded the file meanwhile
                return folder
            progress.stage(f"sharding {arpa} into {folder}, once")
            compile_ahead(KERNELS)
            build_shard_set(arpa, folder, 1, progress=progress.tell)
            if _key(arpa) != key:
                shutil.rmtree(folder)
                raise ConfigError(f"{arpa} changed while it was read; open it again")
            claim(folder)
            _forget_others(home, key)
            bound(home, _SET)
    except OSError as exc:
        raise ConfigError(
            f"cannot write the shard set of {arpa} to {home}: {exc}. Free some space there, or set "
            "DLM_CACHE_DIR to another folder"
        ) from exc
    log.info("asr.model.sharded")
    return folder


def _key(arpa: Path) -> tuple[str, str, str]:
    found: dict[str, Any] | None = describe_input(arpa.resolve())
    if found is None:
        raise ArpaError(
            "found a pipe or a device; expected a regular file. Copy the model into a regular file",
            path=str(arpa),
        )
    path = found.pop("path")
    content = json.dumps([found, FORMAT_VERSION], sort_keys=True)
    name = re.sub(r"[^A-Za-z0-9._]", "_", arpa.name)[:60]
    digests = (hashlib.blake2b(t.encode("utf-8", "surrogateescape")) for t in (path, content))
    place, stamp = (digest.hexdigest()[:16] for digest in digests)
    return name, place, stamp


def _opened(folder: Path) -> bool:
    """Whether a folder has a shard set; if so, marks the set as in use until this process ends."""
    return (folder / MANIFEST).is_file() and claim(folder)


def _forget_others(home: Path, key: tuple[str, str, str]) -> None:
    """Removes shard sets of the file's earlier content; processes that mapped one keep it."""
    for other in home.glob(f"{key[0]}-{key[1]}-*"):
        if (
            other.is_dir()
            and re.fullmatch(r"[0-9a-f]{16}", other.name[-16:])
            and (other.name != "-".join(key))
        ):
            shutil.rmtree(other, ignore_errors=True)
