"""Who may use the socket of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm.federated.devices.sockets import DeviceSocket


@pytest.mark.parametrize(("folder", "socket"), [(0o700, 0o600), (0o755, 0o600), (0o2750, 0o660)])
def test_a_socket_is_its_owners_unless_its_folder_hands_down_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: int, socket: int
) -> None:
    """A process of another user, which cannot read the text, may then pass messages on."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    place = Path("sockets")
    place.mkdir()
    place.chmod(folder)
    listening = DeviceSocket(place / "ann.sock", bytes)
    assert (place / "ann.sock").stat().st_mode & 0o777 == socket
    listening.close()
