"""cluster.toml: where the servers are, which model is the default, and how to reach them.

A running client (`ClusterFile`) applies changes to servers, default model and roll-out. Changes to
other settings are only checked and logged, so operators learn of mistakes before the next start.
"""

from __future__ import annotations

import json
import os
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import xxhash

from dlm.client.config import PLAIN, ClientConfig, ClientSecurity, check_address
from dlm.config import about, check, like, nearest, parse_toml, resolve, setting, settings_of
from dlm.errors import ConfigError
from dlm.files import editing, write_whole
from dlm.index.placed import local_set
from dlm.logs import EventLog
from dlm.stores.fetching import remembered
from dlm.stores.remote import AnyPath, RemotePath, located
from dlm.wire.certificates import Contents, read_certificates
from dlm.wire.ids import check_beginning
from dlm.wire.secret import (
    AUTHORIZATION,
    SCHEME,
    parse_token_file,
    read_secret,
    require_file,
    signature,
)

# -------------------------------------------------------------------------------------------------
# The files that a client's security settings name: certificates, and the token of each call.
#
# They are read when a client starts, and again whenever they change; if a changed file is unusable,
# its last usable content stays in use.


log = EventLog(__name__)

Metadata = tuple[tuple[str, str], ...]
Token = Callable[[], Metadata]  # returns a call's metadata, with the file's current token
Certificates = Callable[[], Contents]  # returns the certificates for a channel's handshakes
T = TypeVar("T")


def check_files(security: ClientSecurity) -> None:
    """Reads certificates, key and token; raises `ConfigError` if a file is missing or unusable."""
    certificates_of(security)
    read_token(security)


def certificates_of(security: ClientSecurity) -> Certificates | None:
    """Makes a function that returns the certificates for a channel's handshakes; None without TLS.
    Raises ConfigError if a file is missing or unusable."""
    if not security.ca:
        return None
    files = {"ca": security.ca, "cert": security.cert, "key": security.key}
    paths = [Path(name) for name in files.values() if name]
    return _LastUsable("certificates", partial(read_certificates, **files), *paths)


def read_token(security: ClientSecurity) -> Token | None:
    """Makes a function that returns the metadata with a call's token; None without a token.
    Raises ConfigError if the file is missing or unusable."""
    if security.token:
        fixed = ((AUTHORIZATION, SCHEME + security.token),)
        return lambda: fixed
    if not security.token_file:
        return None
    path = Path(security.token_file)

    def read() -> Metadata:
        return ((AUTHORIZATION, SCHEME + parse_token_file(read_secret(path), path)),)

    return _LastUsable("token", read, path)


class _LastUsable(Generic[T]):
    """Keeps the last usable content of files; any thread may ask for the content."""

    def __init__(self, what: str, read: Callable[[], T], *paths: Path) -> None:
        self._what, self._read, self._paths = what, read, paths
        self._seen = signature(*paths)
        self._found = read()
        self._logged = ""

    def __call__(self) -> T:
        """Returns the content; logs once why changed files are unusable."""
        now = signature(*self._paths)
        if now != self._seen:
            try:
                # `_seen` is set after the read: unreadable files may be readable next time.
                self._found, self._seen, self._logged = self._read(), now, ""
            except ConfigError as exc:
                if str(exc) != self._logged:
                    self._logged = str(exc)
                    log.error("client.%s.kept", self._what, extra={"error": self._logged})
        return self._found


# -------------------------------------------------------------------------------------------------
# The roll-out that cluster.toml describes: which share of new utterances gets the next model.


CHANGED = ("model", "rollout")
_TABLE = re.compile(r"\s*\[")
_MODEL = re.compile(r"\s*model\s*=")


@dataclass(frozen=True, slots=True)
class Rollout:
    """The next model beside the default one: the table [rollout], which `dlm rollout` writes."""

    model: str = field(
        metadata=about("The first digits of the next model's id, or of its shard set's.")
    )
    replaces: str = field(metadata=about("First digits of the replaced model's or shard set's id."))
    share: float = field(
        metadata=about("Share of new utterances that get the next model.", low=0, high=1)
    )

    @property
    def text(self) -> str:
        return (
            f"roll-out: {100 * self.share:g} % of new utterances get shard set {self.model[:12]}, "
            f"which replaces {self.replaces[:12]}"
        )

    def takes(self, key: str | bytes | None, draw: Callable[[], float] = random.random) -> bool:
        """Whether a new utterance gets the next model; its key's hash decides, or chance. A key
        keeps the next model while the share grows; another roll-out chooses other keys."""
        if key is None:
            return draw() < self.share
        data = key.encode() if isinstance(key, str) else key
        # DO NOT CHANGE: decoders on several hosts must give a key the same model.
        return xxhash.xxh3_64_intdigest(self.model.encode() + b"\0" + data) < self.share * 2**64


def edited(text: str, model: str | None, rollout: Rollout | None) -> str:
    """Returns a cluster.toml's text with this default model and roll-out; the rest stays. Raises
    ConfigError if either has a form that `dlm` does not write, such as an inline table."""
    kept: list[str] = []
    is_top, in_rollout = True, False
    for line in text.splitlines():
        if _TABLE.match(line):
            is_top, in_rollout = False, line.split("#")[0].strip() == "[rollout]"
        if line.startswith("#") or not (in_rollout or (is_top and _MODEL.match(line))):
            kept.append(line)
    comments = 0
    while comments < len(kept) and kept[comments].startswith("#"):
        comments += 1
    head = [f"model = {json.dumps(model)}"] if model else []
    if rollout is not None:
        values = (f"{name} = {json.dumps(value)}" for name, value in asdict(rollout).items())
        while kept and not kept[-1].strip():
            kept.pop()
        kept += ["", "[rollout]", *values]
    after = "\n".join([*kept[:comments], *head, *kept[comments:]]) + "\n"
    wanted = {name: value for name, value in tomllib.loads(text).items() if name not in CHANGED}
    if model:
        wanted["model"] = model
    if rollout is not None:
        wanted["rollout"] = asdict(rollout)
    try:
        is_right = tomllib.loads(after) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise ConfigError(
            "cluster.toml has `model` or `rollout` in a form that this command cannot edit; "
            'expected a line `model = "ID"` before all tables, and a table that begins with a line '
            "[rollout]. Nothing was changed; correct the file, and repeat the command"
        )
    return after


MOST_BYTES = 512 << 10  # enough for 10,000 servers, and read in less than a second
WRITTEN_BY = "# Written by dlm cluster"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of a cluster.toml that come before its tables."""

    model: str | None = setting(
        None,
        "The default model: at least the first six digits of its id. Without it, clients use the "
        "first model of the servers. Running clients follow a change; open utterances keep their "
        "model.",
    )
    local_fallback: str | None = setting(
        None,
        "Folder of a shard set, relative to the file, that clients with `bigram_fallback` switch "
        "to while servers fail.",
    )
    token_file: str = setting("", "File with the clients' token, relative to the file.")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The table [tls]; with it, clients use TLS."""

    ca: str = setting(
        "", "PEM file of the CA that signed the servers' certificates, relative to the file."
    )
    cert: str = setting("", "PEM file of the clients' certificate.")
    key: str = setting("", "PEM file of the clients' private key, mode 600 (640 if root owns it).")
    server_name: str = like(ClientSecurity, "server_name")
    use_proxy: bool = setting(False, "Use the proxy set in the environment.")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, from a table [[server]]."""

    address: str = field(metadata=about("host:port."))
    shard: int | None = setting(
        None,
        "The shard that the server serves: a hint, used while the server does not answer.",
        low=0,
    )
    pid: int | None = setting(
        None, "Id of the server's process, if it runs on this machine.", low=1
    )


ABOVE = tuple(one.name for one in settings_of(ClusterSettings))
TLS = tuple(one.name for one in settings_of(TlsSettings))
TABLES = ("tls", "rollout", "server")


class FixedEndpoints:
    """A fixed list of servers, with the methods of `ClusterFile`. Picklable."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)

    def __call__(self) -> list[Endpoint]:
        return self.endpoints

    def model(self) -> str | None:
        """The default model that the operator names; None leaves the choice to the servers."""
        return None

    def rollout(self) -> Rollout | None:
        """The next model, if some new utterances are to get it."""
        return None

    def stamp(self) -> object:
        """A value that changes if the servers or the model may have changed."""
        return None

    def kept(self) -> list[str]:
        """Changed settings that a running client does not apply; raises ConfigError if a client
        that starts now would reject them."""
        return []


@dataclass(frozen=True, slots=True)
class StartSettings:
    """The settings that a client takes from cluster.toml and its configuration when it starts."""

    security: ClientSecurity
    local_fallback: Path | None

    @classmethod
    def of(cls, toml: ClusterToml, config: ClientConfig) -> StartSettings:
        """Returns the settings of a client that starts now; `config` takes precedence. Raises
        ConfigError if a setting is wrong, or names a file or folder that cannot be used."""
        security = config.security.over(toml.security())
        check_files(security)
        local_fallback = config.local_fallback
        if config.bigram_fallback and local_fallback is None and config.heartbeats is not False:
            named = toml.local_fallback()
            local_fallback = None if named is None else local_set(named)
            if local_fallback is not None and not local_fallback.is_dir():
                found = f"{toml.path} names the local fallback {local_fallback}"
                raise ConfigError(
                    f"{found}, which is a file; expected a shard set's folder, as written by "
                    "`dlm shard`"
                    if local_fallback.exists()
                    else f"{found}, but this machine has no such folder; copy the folder to it, "
                    "correct the path in the file, or pass ClientConfig(local_fallback=...)"
                )
        return cls(security, local_fallback)

    def changed(self, now: StartSettings) -> list[str]:
        mine, other = self.security, now.security
        keys = [key for key in ("token_file", *TLS) if getattr(mine, key) != getattr(other, key)]
        local_fallback = ["local_fallback"] if self.local_fallback != now.local_fallback else []
        return local_fallback + [f"tls.{key}" if key in TLS else key for key in keys]


class ClusterFile:
    """A cluster.toml that may change: each call reads the file, and parses it again if it changed.
    The client's configuration takes precedence. Raises ConfigError if a client cannot start with
    this file."""

    def __init__(self, path: str | os.PathLike[str], config: ClientConfig | None = None) -> None:
        # A copy of the path: reads here must not change which version the caller's path replaces.
        self.path: AnyPath = located(os.fspath(path)).absolute()
        self._config = config or ClientConfig()
        self._toml = ClusterToml(self.path)  # raises, and says what to do, if there is no such file
        self._toml.servers()  # checked now, not when first used
        self._toml.rollout()
        self.started = StartSettings.of(self._toml, self._config)

    def __call__(self) -> list[Endpoint]:
        return self._now().servers()

    def model(self) -> str | None:
        return self._now().model()

    def rollout(self) -> Rollout | None:
        return self._now().rollout()

    def stamp(self) -> object:
        path = self.path
        return path.version() if isinstance(path, RemotePath) else signature(path)

    def kept(self) -> list[str]:
        return self.started.changed(StartSettings.of(self._now(), self._config))

    def _now(self) -> ClusterToml:
        self._toml = toml = self._toml.again()
        return toml


Servers: TypeAlias = FixedEndpoints | ClusterFile


class ClusterToml:
    """The content of a cluster.toml, parsed once; a table is checked when it is used. Raises
    ConfigError if the file is missing, is not TOML, or has an unknown setting."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: AnyPath = located(path)
        self.text = _text(self.path)
        content = parse_toml(self.text, path)
        tables = {name: content.pop(name) for name in TABLES if name in content}
        if "token" in content or "token" in tables.get("tls", ()):
            raise ConfigError(
                f"{path} contains a token, but cluster files are usually readable by many people; "
                "move the token to a file that only its owner can read, and set token_file to the "
                "path of that file"
            )
        for name in content.keys() - set(ABOVE):
            advice = nearest(name, (*ABOVE, *TABLES))
            raise ConfigError(f"{path} cannot have a setting named {name}{advice}")
        self._above, self._tables = self._of(ClusterSettings, "", content), tables

    def _of(self, kind: type[T], section: str, table: object) -> T:
        with self._named():
            found = resolve(kind, section, file=self.path, found={section: table}, environ={})
            check(section, found)
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as exc:
            if str(self.path) not in str(exc):
                exc.add_note(f"in {self.path}")
            raise

    def again(self) -> ClusterToml:
        return self if _text(self.path) == self.text else ClusterToml(self.path)

    def servers(self) -> list[Endpoint]:
        """Returns the servers; raises ConfigError if there is none, or if a table is wrong."""
        servers = self._tables.get("server")
        if not isinstance(servers, list) or not servers:
            raise ConfigError(
                f"{self.path} lists no servers; expected one [[server]] table per server"
            )
        # In TOML, a table has all keys between its header and the next header.
        tables = [one for one in servers if isinstance(one, dict)]
        if lost := [name for one in tables for name in ABOVE if name in one]:
            raise ConfigError(
                f"{self.path}: {lost[0]} is below a [[server]] table; move it above the first table"
            )
        found = [self._of(Endpoint, "server", server) for server in servers]
        with self._named():
            for one in found:
                check_address(one.address)
        return found

    def local_fallback(self) -> AnyPath | None:
        """The local fallback's folder, resolved against the file's folder; None if not set."""
        folder = self._above.local_fallback
        return self.path.absolute().parent / folder if folder else None

    def model(self) -> str | None:
        """The default model; None if not set. Raises `ConfigError` if no id can begin with it."""
        return self._id(self._above.model)

    def _id(self, beginning: str | None) -> str | None:
        with self._named():
            return check_model(beginning)

    def rollout(self) -> Rollout | None:
        """The table [rollout]; None if there is none. Raises `ConfigError` if it is wrong."""
        if "rollout" not in self._tables:
            return None
        found = self._of(Rollout, "rollout", self._tables["rollout"])
        model, replaces = self._id(found.model), self._id(found.replaces)
        return replace(found, model=model or "", replaces=replaces or "")

    def security(self) -> ClientSecurity:
        """The credentials: the table [tls], and token_file; paths are relative to the file. Raises
        ConfigError for an unknown setting, or one of the wrong type."""
        tls = self._of(TlsSettings, "tls", self._tables.get("tls", {}))
        folder = self.path.absolute().parent
        files = tls.ca, tls.cert, tls.key, self._above.token_file
        found = [folder / file for file in files if file]
        if any(isinstance(file, RemotePath) for file in found):
            raise ConfigError(
                f"{self.path} is in a store, but has relative paths of files on each host, such as "
                f"{files[-1] or files[0]}; make them absolute"
            )
        ca, cert, key, token = (str(folder / file) if file else "" for file in files)
        with self._named():
            return ClientSecurity(ca, cert, key, tls.server_name, token, use_proxy=tls.use_proxy)


def _text(path: AnyPath) -> str:
    try:
        if isinstance(path, RemotePath):
            data = remembered("cluster.toml", path, path.read_text).encode()
        else:
            require_file(path)
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f"{path} is too large for a list of servers; expected at most {MOST_BYTES} bytes. "
                "Check that it is the right file"
            )
        return data.decode()
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path} does not exist. `dlm cluster DIR` writes this file to the folder that it runs "
            "in; run this command in that folder, or give the path of the file"
        ) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read as TOML: {exc}") from exc


def write_cluster_file(
    path: Path,
    endpoints: Sequence[Endpoint],
    *,
    security: ClientSecurity = PLAIN,
    local_fallback: AnyPath | None = None,
    model: str | None = None,
    rollout: Rollout | None = None,
) -> None:
    """Writes cluster.toml completely or not at all, with all of `security` but the token itself."""
    folder = None if local_fallback is None else str(local_fallback.absolute())
    lines = [f"{WRITTEN_BY}."]
    for name, value in (
        ("local_fallback", folder),
        ("token_file", security.token_file),
    ):
        if value:
            lines += ["", f"{name} = {json.dumps(value)}"]
    if security.ca:
        values = [(name, getattr(security, name)) for name in TLS]
        lines += ["", "[tls]", *(f"{name} = {json.dumps(v)}" for name, v in values if v)]
    lines += _server_lines(endpoints)
    write_whole(path, edited("\n".join(lines) + "\n", model, rollout).encode())


def edit(path: AnyPath, change: Callable[[ClusterToml], str], why: str = "dlm") -> None:
    """Replaces a cluster.toml with the result of `change`; calls `change` again if another program
    wrote the file meanwhile. Owner, mode and a symbolic link stay. Raises ConfigError, and changes
    nothing, if the file is incomplete, or is in a store and another process changed it."""
    path = path.resolve()
    if isinstance(path, RemotePath):
        if not path.replace(change(ClusterToml(path)).encode(), why):
            raise ConfigError(
                f"another process changed {path} while this command ran, so nothing was written; "
                "check dlm rollout --history, and repeat the command if it is still needed"
            )
        return
    with editing(path):
        while True:
            toml = ClusterToml(path)
            toml.servers()
            before, after = toml.text.encode(), change(toml).encode()
            if after == before or write_whole(path, after, keep_owner=True, instead_of=before):
                return


def replace_servers(path: Path, change: Callable[[Sequence[Endpoint]], Sequence[Endpoint]]) -> None:
    """Replaces the servers in a file that `write_cluster_file` wrote; the rest stays."""

    def changed(toml: ClusterToml) -> str:
        head = toml.text.split("\n[[server]]")[0].splitlines()
        text = "\n".join([*head, *_server_lines(change(toml.servers()))]) + "\n"
        return edited(text, toml.model(), toml.rollout())

    edit(path, changed)


def _server_lines(endpoints: Sequence[Endpoint]) -> list[str]:
    lines = []
    # Processes may share an address.
    for endpoint in {(one.address, one.shard): one for one in endpoints}.values():
        lines += ["", "[[server]]", f'address = "{endpoint.address}"']
        if endpoint.shard is not None:
            lines.append(f"shard = {endpoint.shard}")
        if endpoint.pid is not None:
            lines.append(f"pid = {endpoint.pid}")
    return lines


def check_model(model: str | None) -> str | None:
    """Returns `model` in lower case; raises `ConfigError` if no model's id can begin with it."""
    return None if model is None else check_beginning(model)
