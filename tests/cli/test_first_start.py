"""The first start of an installation compiles once, however many servers it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlm.cli import processes
from dlm.index.build import build_shard_set
from models import random_model


def test_the_first_server_compiles_before_the_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are there already, all start at once."""
    path = random_model(4, per_order=50).write(tmp_path / "m.arpa")
    build_shard_set(path, tmp_path / "set", 3)
    real = processes._start
    before: list[bool] = []  # whether the first was ready when another was started
    first: list[Path] = []

    def start(command: Sequence[str]) -> Any:
        ready = Path(command[command.index("--ready-file") + 1])
        first.append(ready)
        before.append(first[0].exists())
        return real(command)

    monkeypatch.setattr(processes, "_start", start)
    for compiled in (True, False):
        monkeypatch.setattr(processes, "compiled", lambda there=compiled: there)
        before.clear()
        first.clear()
        with processes.running_servers([tmp_path / "set"]) as servers:
            assert [server.endpoint.shard for server in servers] == [0, 1, 2]
        assert before == [False, not compiled, not compiled]


def test_what_a_server_compiled_is_found_where_numba_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of NUMBA_CACHE_DIR, or beside the package."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not processes.compiled()
    (tmp_path / "server_1").mkdir()
    (tmp_path / "server_1" / "kernels.count_orders-74.py311.nbi").touch()
    assert processes.compiled()
