"""A checkpoint is whole or refused, and reads back to the bit."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm import checkpoint  # noqa: E402
from dlm.errors import ConfigError, FormatError  # noqa: E402
from dlm.federated.training import trained  # noqa: E402

SETTINGS = {"rounds": 5, "server": {"learning_rate": 0.1}, "clip": (1.0, 2.0)}


def tree() -> dict[str, Any]:
    """Arrays of every kind that a state has, with values that printing would lose."""
    rng = np.random.default_rng(0)
    return {
        "params": jnp.asarray(rng.normal(size=(7, 3)), "float32"),
        "odd": jnp.asarray([np.inf, -0.0, 1e-45, np.nan], "float32"),
        "round": jnp.int32(3),
        "nothing": jnp.zeros((0, 4)),
        "ledger": np.arange(9, dtype=np.int64) << 40,
        "buffers": (np.float64(1) / 3, jnp.asarray([True, False])),
    }


def bits(value: Any) -> list[bytes]:
    """All leaves as bytes, with their types."""
    return [leaf.tobytes() for leaf in trained.leaves(value)]


def save(path: Path, value: Any, **more: Any) -> None:
    """A tree with the settings."""
    checkpoint.save(path, trained.leaves(value), SETTINGS, **more)


def load(path: Path, template: Any, settings: dict[str, Any] = SETTINGS) -> Any:
    """The tree again."""
    found = checkpoint.read(path)
    found.refuse_other_settings(settings)
    return trained.rebuilt(found.arrays, template, path)


def test_a_tree_reads_back_to_the_bit(tmp_path: Path) -> None:
    """Numbers of every type, NaN, negative zero, denormals."""
    save(tmp_path / "c", tree())
    back = load(tmp_path / "c", tree())
    assert bits(back) == bits(tree())
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree()), strict=True):
        assert a.dtype == b.dtype


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    """Each that differs, with both values; tuples and lists are the same."""
    save(tmp_path / "c", tree())
    load(tmp_path / "c", tree(), {**SETTINGS, "clip": [1.0, 2.0]})
    other = {"rounds": 6, "server": {"learning_rate": 0.1, "momentum": 0.9}, "clip": (1.0, 2.0)}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "c", tree(), other)
    assert "rounds was 5 and is 6" in str(caught.value)
    assert "server.momentum was None and is 0.9" in str(caught.value)
    assert "learning_rate" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """At every byte of the header, and at some of the arrays."""
    path = tmp_path / "c"
    save(path, tree())
    whole = path.read_bytes()
    for length in [*range(60), *range(60, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            load(path, tree())


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    """Wherever it is: in a mark, a length, the settings or an array."""
    path = tmp_path / "c"
    save(path, tree())
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(FormatError):
            checkpoint.read(path)


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    """More arrays, or one of another size or type."""
    save(tmp_path / "c", tree())
    for other in ({**tree(), "more": jnp.int32(1)}, {**tree(), "round": jnp.float32(3)}):
        with pytest.raises(FormatError, match="state"):
            load(tmp_path / "c", other, SETTINGS)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing beside it."""
    path = tmp_path / "c"
    save(path, tree())
    before = path.read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        save(path, {"a": jnp.zeros(3)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_for_the_owner_is_so_from_its_first_byte(tmp_path: Path) -> None:
    """Mode 0600, also under a lax umask, also where a laxer file was there before."""
    path = tmp_path / "noise"
    path.write_bytes(b"")
    path.chmod(0o666)
    save(path, tree(), mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
