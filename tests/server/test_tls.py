"""dlm.server.tls: which certificates and keys are taken."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Authority
from dlm.errors import ConfigError
from dlm.server.tls import Certificates


@pytest.fixture
def authority(tmp_path) -> Authority:
    """One that signs."""
    return Authority(tmp_path)


def test_a_certificate_its_key_and_an_authority_are_taken(authority):
    """And again, when they are read anew."""
    pair = authority.server
    certificates = Certificates(pair.cert, pair.key, authority.ca)
    certificates.reload()
    assert certificates.paths == (pair.cert, pair.key, authority.ca)


def test_a_key_of_another_certificate_is_refused(authority):
    """As when one file of the pair has been replaced and the other not yet."""
    with pytest.raises(ConfigError, match="not a PEM certificate and its key"):
        Certificates(authority.server.cert, authority.client.key, None)


def test_a_key_that_others_may_read_is_refused(authority):
    """Like every secret."""
    authority.server.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod 6[04]0"):
        Certificates(authority.server.cert, authority.server.key, None)


def test_a_key_with_a_password_is_refused_without_asking(authority):
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
    with pytest.raises(ConfigError, match="without a password"):
        Certificates(pair.cert, pair.key, None)


@pytest.mark.parametrize("content", [b"", b"no PEM\n", b"\xff\xfe", None])
@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_what_is_no_pem_is_refused(authority, which, content):
    """Empty, text, bytes, or not there at all."""
    files = {"cert": authority.server.cert, "key": authority.server.key, "ca": authority.ca}
    if content is None:
        files[which].unlink()
    else:
        files[which].write_bytes(content)
    with pytest.raises(ConfigError, match=str(files[which])):
        Certificates(files["cert"], files["key"], files["ca"])
