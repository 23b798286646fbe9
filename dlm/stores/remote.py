"""An object in a store, or a folder of objects: `s3://BUCKET/KEY`, `gs://`, `az://`, `https://`,
and `hf://ORG/NAME[@REVISION]/PATH` for the Hugging Face hub.

Readers of small files can use a `RemotePath` instead of a `Path`.
Credentials are the stores' own: environment variables, or the role of the machine.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dlm.errors import AuthenticationError, ConfigError, UnavailableError
from dlm.logs import EventLog

log = EventLog(__name__)
T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "https", "http", "hf")
_PLACE = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}([^/].*)")
HUB = "https://huggingface.co"
RELOAD_S = 5.0  # seconds between checks of an object that is followed
CONNECT_S, STALL_S = 5, 20  # seconds to reach a store, and to wait for its next byte
# Failing requests are repeated for RETRY_S seconds; each may take CALL_S, since parts are large.
RETRY_S, CALL_S = 15, 300
MOST_BYTES = 64 << 20  # limit of an object that is read whole
LEAST_BYTES = 8 << 20  # minimum bytes of a pushed part
HISTORY = ".history"
XXH3, SHA256 = "xxh3128", "sha256"  # names of attributes; Azure accepts only identifiers


class RemotePath:
    """An object or a folder of objects; its `str` has no credentials.

    Args
        root  the bucket, the host, or ORG/NAME@REVISION of the hub
        key   the object's name in the root
    """

    def __init__(self, scheme: str, root: str, key: str) -> None:
        self.scheme, self.root, self.key = scheme, root, key
        # The object's version and content that were last read or written, and the condition
        # with which `put` replaces that version.
        self._seen: tuple[str, bytes, Mapping[str, Any]] | None = None
        self._looked, self._told = 0.0, ""
        self._looking = 0  # the process that checks the store; a forked child checks for itself

    def __reduce__(self) -> tuple[type[RemotePath], tuple[str, str, str]]:
        return RemotePath, (self.scheme, self.root, self.key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.root}/{self.key}"

    __repr__ = __fspath__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __truediv__(self, name: str | os.PathLike[str]) -> Any:
        """An object in this folder; a URL or an absolute path stays unchanged."""
        found = located(name)
        if isinstance(found, RemotePath) or found.is_absolute():
            return found
        return RemotePath(self.scheme, self.root, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        return self.key.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.scheme, self.root, self.key.rpartition("/")[0])

    def with_suffix(self, suffix: str) -> RemotePath:
        return self.parent / Path(self.name).with_suffix(suffix).name  # type: ignore[no-any-return]

    def absolute(self) -> RemotePath:
        return self

    resolve = absolute

    def exists(self) -> bool:
        try:
            self.read_bytes()
        except FileNotFoundError:
            return False
        return True

    is_file = exists

    # -- an object that is read whole ---------------------------------------------------------

    def read_bytes(self, *, fresh: bool = False) -> bytes:
        """The content at the last check, or now if `fresh`.

        Raises  FileNotFoundError, UnavailableError, AuthenticationError, ConfigError
        """
        if self._seen is None or fresh:
            self._look()
        assert self._seen is not None
        return self._seen[1]

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def version(self) -> object:
        """A value that changes with the object; checks the store in the background."""
        due = time.monotonic() - self._looked >= RELOAD_S
        if due and self._looking != os.getpid():
            self._looking = os.getpid()
            threading.Thread(target=self._follow, name="dlm-store", daemon=True).start()
        return self._seen and self._seen[0]

    def _follow(self) -> None:
        try:
            self._look()
            self._told = ""
        except Exception as exc:  # noqa: BLE001 - what was read stays in use
            if str(exc) != self._told:
                self._told = str(exc)
                log.error("store.kept", extra={"error": self._told})
        finally:
            self._looking = 0

    def _look(self) -> None:
        self._looked = time.monotonic()
        known = self._seen and self._seen[0]
        found = call(_get, self, known)
        if found is not None:
            self._seen = found

    def replace(self, content: bytes, why: str) -> bool:
        """Replaces the version that was last read or written, or else creates the object. A copy
        beside the object has the time, the user and the reason. Returns False, and writes nothing,
        if others changed the object since; a store without conditional writes loses that change."""
        if self._seen is not None and self._seen[1] == content:
            return True
        at, user = datetime.now(UTC), os.environ.get("USER") or f"uid {os.getuid()}"
        made = call(put, self, content, {} if self._seen is None else self._seen[2])
        if made is None:  # perhaps the object was written, but the answer was lost
            return self.read_bytes(fresh=True) == content
        self._seen = version_of(made), content, made
        who = f"{user}@{socket.gethostname()}: {' '.join(why.split())}"
        told = f"# {at:%Y-%m-%dT%H:%M:%SZ} {who}\n".encode()
        call(put, self.parent / f"{self.name}{HISTORY}" / f"{at:%Y%m%dT%H%M%S.%fZ}", told + content)
        return True

    def history(self) -> list[tuple[str, bytes]]:
        """Returns each version's line of time, writer and reason, and its content; oldest first."""
        folder = self.parent / f"{self.name}{HISTORY}"
        found = [(folder / name).read_bytes() for name in call(_names, folder)]
        versions = [one.partition(b"\n") for one in found]
        return [(head.decode().removeprefix("# "), text) for head, _, text in versions]


AnyPath: TypeAlias = Path | RemotePath


def located(named: str | os.PathLike[str]) -> Any:
    """Returns the `RemotePath` or else the `Path` that a text names; `Path` drops a URL's slash."""
    if isinstance(named, RemotePath):
        return named
    text = os.fspath(named)
    match = _PLACE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return Path(os.fsdecode(text))
    scheme, rest = match.groups()
    root, _, key = rest.partition("/")
    if "@" in root or re.search(r"[?#]", rest):
        raise ConfigError(
            f"the {scheme}:// URL has a user, a password, a query or a fragment; leave these out, "
            "and give credentials in the store's own environment variables"
        )
    if scheme == "hf":
        name, _, key = key.partition("/")
        name, _, revision = name.partition("@")
        if not name:
            raise ConfigError(f"{text} names no repository; expected hf://ORG/NAME/PATH")
        root = f"{root}/{name}@{revision or 'main'}"
    key = key.strip("/")
    if {"", ".", ".."} & {*key.split("/")} and key:
        raise ConfigError(
            f"{text} has an empty part, '.' or '..' between slashes; give the name of an object"
        )
    return RemotePath(scheme, root, key)


# -- the library -------------------------------------------------------------------------------


_first: list[int] = []  # the process in which the library was first used


def call(do: Callable[..., T], *args: Any) -> T:
    """Calls a function of this package that uses the library. The library's threads do not survive
    a fork, so in a forked child another process makes the call."""
    _first[:] = _first or [os.getpid()]
    if os.getpid() == _first[0]:
        return do(*args)
    run = subprocess.run(
        [sys.executable, "-P", "-m", "dlm.stores.remote"],
        input=pickle.dumps((do, [one for one in args if not callable(one)])),
        stdout=subprocess.PIPE,
        check=True,
    )
    found, error = pickle.loads(run.stdout)
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


@cache
def opened(scheme: str, root: str) -> Any:
    """Opens the library's store, which makes all retries; nothing else in this package retries."""
    try:
        from obstore import store
    except ModuleNotFoundError as exc:
        from dlm.extras import needed, packages_of

        raise needed(exc, packages_of("stores")) from None
    client: dict[str, Any] = {
        "connect_timeout": f"{CONNECT_S}s",
        "read_timeout": timedelta(seconds=STALL_S),
        "timeout": f"{CALL_S}s",
    }
    retries = {"retry_timeout": timedelta(seconds=RETRY_S)}
    given: dict[str, Any] = {"retry_config": retries, "client_options": client}
    if scheme == "s3":
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            client["allow_http"] = True
        return store.S3Store(root, **given)
    if scheme == "gs":
        return store.GCSStore(root, **given)
    if scheme == "az":
        return store.AzureStore(root, **given)
    url = f"{scheme}://{root}"
    if scheme == "hf":
        url = _hub_url(root)
        client["default_headers"] = _hub_headers()
    client["allow_http"] = url.startswith("http://")
    return store.HTTPStore(url, **given)


def _hub_digest(place: RemotePath) -> str:
    """Returns the SHA-256 of a large file, which the hub sends when it redirects to another server
    for the content."""
    # These imports are slow, and every command imports this file.
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NotFollowed(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    request = Request(f"{_hub_url(place.root)}/{place.key}", method="HEAD", headers=_hub_headers())
    try:
        with build_opener(NotFollowed).open(request, timeout=STALL_S) as found:
            headers = found.headers
    except HTTPError as exc:
        headers = exc.headers
    except OSError:
        return ""
    linked = re.fullmatch(r'"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", ""))
    return linked[1] if linked else ""


def _hub_url(root: str) -> str:
    name, _, revision = root.partition("@")
    return f"{os.environ.get('HF_ENDPOINT', HUB)}/{name}/resolve/{revision}"


def _hub_headers() -> dict[str, str]:
    token = _hub_token()
    return {"authorization": f"Bearer {token}"} if token else {}


def _hub_token() -> str:
    if token := os.environ.get("HF_TOKEN"):
        return token
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    file = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
    return file.read_text().strip() if file.is_file() else ""


@contextmanager
def telling(place: RemotePath) -> Iterator[None]:
    """Turns the library's errors, whose texts contain signed addresses, into dlm's errors."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "no such object", str(place)) from None
    except Exception as exc:
        kind = type(exc).__name__
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            raise AuthenticationError(
                f"{place}: the store denied access to the object. Check the "
                "store's credentials in the environment, and that the object exists"
            ) from None
        # Other errors are dlm's own, or bugs.
        if kind not in dir(exceptions) and not isinstance(exc, (ValueError, OverflowError)):
            raise
        status = re.search(r"status code: \d+|timed out|error sending request|regi\w+", str(exc))
        found = status[0] if status else kind
        if kind == "GenericError":
            raise UnavailableError(
                f"{place}: the store does not answer ({found}). Retry, and check the store's "
                "address, its region, and its credentials in the environment"
            ) from None
        raise ConfigError(
            f"{place}: the store does not support the request ({found}); it must support reading "
            "byte ranges"
        ) from None


def _get(place: RemotePath, known: str | None) -> tuple[str, bytes, Mapping[str, Any]] | None:
    """An object's version, content and condition; None if it still has the known version."""
    import obstore
    from obstore.exceptions import NotModifiedError

    with telling(place):
        try:
            store = opened(place.scheme, place.root)
            options: Any = {"if_none_match": known} if known else {}
            found = obstore.get(store, place.key, options=options)
        except NotModifiedError:
            return None
        if found.meta["size"] > MOST_BYTES:
            raise ConfigError(
                f"{place} has {found.meta['size']:,} bytes; expected at most {MOST_BYTES:,}"
            )
        condition = {name: found.meta[name] for name in ("e_tag", "version")}
        return version_of(found.meta), bytes(found.bytes()), condition


def version_of(meta: Mapping[str, Any]) -> str:
    return meta["e_tag"] or f"{meta.get('last_modified')} {meta.get('size')}"


def put(
    place: RemotePath,
    content: bytes | Path,
    condition: Mapping[str, Any] | None = None,
    **more: Any,
) -> Mapping[str, Any] | None:
    """Writes an object; a file is sent in parts. With a condition, replaces only the version that
    it names; with an empty condition, only creates. Returns None if the condition does not hold."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

    given = {name: value for name, value in (condition or {}).items() if value}
    mode: Any = None if condition is None else given or "create"
    if place.scheme in ("http", "https", "hf"):
        raise ConfigError(f"{place} cannot be written; push to s3://, gs:// or az://")
    with telling(place):
        try:
            store = opened(place.scheme, place.root)
            try:
                return dict(obstore.put(store, place.key, content, mode=mode, **more))
            except NotSupportedError:
                return dict(obstore.put(store, place.key, content, **more))
        except (AlreadyExistsError, PreconditionError):
            return None


def put_file(place: RemotePath, file: Path, digest: str) -> None:
    """Writes a file in parts, with its XXH3-128; a store takes at most 10,000 parts."""
    part = max(LEAST_BYTES, -(-file.stat().st_size // 9_000))
    put(place, file, chunk_size=part, attributes={XXH3: digest})


def head(place: RemotePath) -> tuple[str, int, dict[str, str]]:
    """Version, size in bytes and attributes of an object; the attributes include its digest if the
    store, or whoever pushed it, gives one."""
    import obstore

    with telling(place):
        store = opened(place.scheme, place.root)
        found = obstore.get(store, place.key, options={"head": True})
    attributes = {name.lower(): str(value) for name, value in found.attributes.items()}
    if place.scheme == "hf" and (digest := _hub_digest(place)):
        attributes[SHA256] = digest
    return version_of(found.meta), found.meta["size"], attributes


def _names(folder: RemotePath) -> list[str]:
    import obstore

    with telling(folder):
        found = obstore.list(opened(folder.scheme, folder.root), folder.key).collect()
    return sorted(one["path"].rsplit("/", 1)[-1] for one in found)


def main() -> None:
    """Runs the function that another process passed to `call`."""
    do, args = pickle.load(sys.stdin.buffer)
    found, error = None, None
    try:
        found = do(*args)
    except Exception as exc:  # noqa: BLE001 - the other process raises it
        error = exc
    pickle.dump((found, error), sys.stdout.buffer)


if __name__ == "__main__":
    main()
