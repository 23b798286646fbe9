"""dlm.server.sets: when a file has changed and come to rest."""

from __future__ import annotations

import logging

from dlm.errors import ConfigError
from dlm.server.sets import FileWatcher, reload_if_changed


def test_a_change_is_told_only_when_it_is_over_and_until_it_is_applied(tmp_path):
    """A file that still grows is left alone."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("1")
    watch = FileWatcher([path, other])
    assert not watch.changed()
    path.write_text("12")
    assert not watch.changed()  # it may not be whole yet
    path.write_text("123")
    assert not watch.changed()
    assert watch.changed()
    assert watch.changed()  # until it is applied
    watch.applied()
    assert not watch.changed()
    other.write_text("x")
    assert [watch.changed() for _ in range(3)] == [False, True, True]
    watch.applied()
    other.unlink()
    assert [watch.changed() for _ in range(3)] == [False, True, True]


def test_a_change_that_is_taken_back_is_none(tmp_path):
    """A link turned away and back between two looks."""
    path = tmp_path / "a"
    path.write_text("1")
    watch = FileWatcher([path])
    path.rename(tmp_path / "b")
    assert not watch.changed()
    (tmp_path / "b").rename(path)
    watch.changed()
    if watch.changed():  # renaming may have touched the file's times
        watch.applied()
    assert not watch.changed()


def test_a_rejected_change_is_tried_again_and_logged_once_per_error(tmp_path, caplog):
    """As when descriptors ran out for a while: a revoked token must not stay. Once it is applied,
    that is one event with what was taken up; nothing without a change."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "a"
    path.write_text("1")
    watch = FileWatcher([path])
    faults = ["bad", "bad", "no descriptors", ""]

    def reload():
        if fault := faults.pop(0):
            raise ConfigError(fault)
        return {"clients": ["alice"], "calls_ended": 2}

    path.write_text("12")
    for _ in range(6):
        reload_if_changed(watch, reload, what="tokens")
    assert [(r.event, getattr(r, "error", None)) for r in caplog.records] == [
        ("server.tokens.kept", "bad"),
        ("server.tokens.kept", "no descriptors"),
        ("server.tokens.reloaded", None),
    ]
    taken = caplog.records[-1]
    assert (taken.files, taken.clients, taken.calls_ended) == (1, ["alice"], 2)
