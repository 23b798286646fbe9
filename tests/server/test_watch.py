"""dlm.server.watch: when a file has changed and come to rest."""

from __future__ import annotations

import logging

from dlm.errors import ConfigError
from dlm.server.watch import FileWatcher, reload_if_changed


def test_a_change_is_told_once_and_only_when_it_is_over(tmp_path):
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
    assert not watch.changed()
    other.write_text("x")
    assert [watch.changed() for _ in range(3)] == [False, True, False]
    other.unlink()
    assert [watch.changed() for _ in range(3)] == [False, True, False]


def test_a_change_that_is_taken_back_is_none(tmp_path):
    """A link turned away and back between two looks."""
    path = tmp_path / "a"
    path.write_text("1")
    watch = FileWatcher([path])
    path.rename(tmp_path / "b")
    assert not watch.changed()
    (tmp_path / "b").rename(path)
    found = [watch.changed() for _ in range(3)]
    assert found.count(True) <= 1  # renaming may have touched the file's times
    assert not watch.changed()


def test_a_change_is_one_event_with_what_was_taken_up(tmp_path, caplog):
    """Or one that says why it was not; nothing without a change."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "a"
    path.write_text("1")
    watch = FileWatcher([path])
    refuse = [False, True]

    def reload():
        if refuse.pop(0):
            raise ConfigError("bad")
        return {"clients": ["alice"], "calls_ended": 2}

    for content in ("12", "123"):
        path.write_text(content)
        for _ in range(3):
            reload_if_changed(watch, reload, what="tokens")
    taken, kept = caplog.records
    assert (taken.event, kept.event) == (
        "server.tokens.reloaded",
        "server.tokens.kept",
    )
    assert (taken.files, taken.clients, taken.calls_ended) == (1, ["alice"], 2)
    assert kept.error == "bad"
