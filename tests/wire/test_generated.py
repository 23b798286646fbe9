"""dlm.wire._pb is what the generator makes of proto/, and was made by the pinned generator."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from dlm.wire import generate

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "dlm" / "wire" / "_pb"


def pinned() -> str:
    """The version of grpcio-tools in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [d for d in project["optional-dependencies"]["dev"] if d.startswith("grpcio-tools==")]
    assert len(found) == 1
    return found[0].partition("==")[2]


def test_committed_modules_are_what_the_generator_writes(tmp_path):
    """Editing a proto file without generating, or the modules by hand, fails here."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed (extra `dev`)")
    assert metadata.version("grpcio-tools") == pinned(), "generate with the pinned version"
    written = generate.generate(tmp_path / "out")
    modules = {f"{name}_pb2{end}" for name in ("shard", "lm") for end in (".py", ".pyi")}
    assert {p.name for p in written} == {*modules, "lm.openapi.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in written}
    for path in written:
        assert path.read_bytes() == (COMMITTED / path.name).read_bytes(), path.name


def test_generator_is_pinned_to_the_series_that_both_protobufs_load():
    """1.81 writes code for protobuf 6.33, which protobuf 7 loads too."""
    assert pinned().startswith("1.81.")
    assert "Protobuf Python Version: 6.33." in (COMMITTED / "shard_pb2.py").read_text()
