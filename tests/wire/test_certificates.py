"""dlm.wire.certificates: which certificates and keys are taken."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Authority
from cluster import WAIT_S
from dlm.errors import ConfigError
from dlm.wire.certificates import expiry_of, read_certificates

HOLLOW = b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"


@pytest.fixture
def authority(tmp_path) -> Authority:
    """One that signs."""
    return Authority(tmp_path)


@pytest.fixture
def files(authority) -> dict[str, str]:
    """The arguments: files of a client or a server."""
    pair = authority.server
    return {"ca": str(authority.ca), "cert": str(pair.cert), "key": str(pair.key)}


def test_files_are_taken_as_they_are(authority, files):
    """A chain with its own certificate first, and comments in any language, included."""
    authority.server.cert.write_bytes(
        authority.server.cert.read_bytes() + authority.ca.read_bytes()
    )
    authority.ca.write_bytes("# Főtanúsítvány\n".encode() + authority.ca.read_bytes())
    pair = authority.server.key.read_bytes(), authority.server.cert.read_bytes()
    assert read_certificates(**files) == (authority.ca.read_bytes(), *pair)
    assert read_certificates(ca=files["ca"]) == (authority.ca.read_bytes(), None, None)
    assert read_certificates(cert=files["cert"], key=files["key"]) == (None, *pair)


def test_a_key_of_another_certificate_is_refused(authority, files):
    """As when one file of the pair has been replaced and the other not yet; or a chain reversed."""
    with pytest.raises(ConfigError, match="PEM"):
        read_certificates(**(files | {"key": str(authority.client.key)}))
    authority.server.cert.write_bytes(
        authority.ca.read_bytes() + authority.server.cert.read_bytes()
    )
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        read_certificates(**files)


def test_a_key_that_others_may_read_is_refused(authority, files):
    """Like every secret."""
    authority.server.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod 6[04]0"):
        read_certificates(**files)


def test_a_key_with_a_password_is_refused_without_asking(authority, files):
    """A server has nobody to ask."""
    pair = authority.server
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="password"):
        read_certificates(**files)


@pytest.mark.parametrize("content", [b"", b"no PEM\n", b"\xff\xfe", HOLLOW, "torn", "pipe", None])
@pytest.mark.parametrize("which", ["ca", "cert", "key"])
def test_what_is_no_pem_is_refused(files, which, content):
    """Empty, text, bytes, PEM around nothing, half of it, a pipe that nobody writes, not there."""
    path = Path(files[which])
    if content == "torn":
        os.truncate(path, 200)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.unlink()
        if content == "pipe":
            os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=str(path)):
        read_certificates(**files)


@pytest.mark.parametrize("days", [3, 400, 20_000])
def test_what_expires_first_of_a_chain_is_found(authority, days):
    """A certificate, and the one that signed it; years from 2050 on are written otherwise."""
    pair = authority.issue("long", days=days)
    begun = time.time()
    chain = b"# ours\n" + pair.cert.read_bytes() + authority.ca.read_bytes()
    assert expiry_of(chain) == pytest.approx(begun + 86400 * min(days, 20), abs=WAIT_S)
    assert expiry_of(pair.cert.read_bytes()) == pytest.approx(begun + 86400 * days, abs=WAIT_S)


@pytest.fixture
def open_files() -> Iterator[int]:
    """The number of the next descriptor; the limit is as before after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    yield free
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_without_descriptors_files_are_refused_too(files, open_files, left):
    """For each file, and for what the ssl module reads: the caller may try again."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + left, hard))
    with pytest.raises(ConfigError, match="Too many open files"):
        read_certificates(**files)
