"""What is replaced in an object of ours, or in its class, is found; what is not, is not."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest

from dlm.federated.genuine import changes, class_changes, note_made, sealed


def held(value: object) -> object:
    """A function's own function."""
    return value


@sealed
class Part:
    """Has a number, something that leads back to it, nothing, and a method."""

    def __init__(self) -> None:
        self.number, self.nothing = 4.5, None
        self.method_of = self.method
        self.function = lambda: self
        note_made(self)

    def method(self) -> int:
        """Its own."""
        return 1


class Derived(Part):
    """Of ours, and not ours."""


def test_what_was_not_touched_has_no_changes() -> None:
    """Nor has what Python notes for itself, in a class that was pickled."""
    pickle.dumps(Part.method)
    import copyreg

    copyreg._slotnames(Part)  # type: ignore[attr-defined]
    assert changes(Part()) == []
    assert class_changes(Part) == []


@pytest.mark.parametrize("name", ["number", "nothing", "method_of", "function", "method", "new"])
@pytest.mark.parametrize("value", [None, pytest.param(4.25, marks=pytest.mark.slow), held])
def test_an_attribute_that_was_replaced_is_named(name: str, value: object) -> None:
    """By None, too, where what was there has gone."""
    part = Part()
    if (name, value) == ("nothing", None):
        return
    vars(part)[name] = value
    gc.collect(1)  # what is new
    assert changes(part) == [name]
    del vars(part)[name]
    gc.collect(1)
    assert changes(part) == ([] if name in ("method", "new") else [name])


def test_a_class_that_was_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another method, a new one, or one that is gone; put back, it is as it was."""
    part = Part()
    for name in ("method", "__getattribute__"):
        with monkeypatch.context() as patch:
            patch.setattr(Part, name, lambda self, *rest: 2, raising=False)
            assert class_changes(Part) == [name]
        assert changes(part) == []
    with monkeypatch.context() as patch:
        patch.delattr(Part, "method")
        assert changes(part) == ["method"]
    assert changes(part) == []


def test_an_object_that_nobody_noted_is_changed_in_all_that_it_has() -> None:
    """As is one of a class that is not sealed."""
    bare = object.__new__(Part)
    bare.number = 3.0
    assert changes(bare) == ["number"]
    assert "__module__" in changes(Derived())


def test_what_is_noted_keeps_nothing_alive() -> None:
    """Though its attributes lead back to it."""
    part = Part()
    seen = weakref.ref(part)
    del part
    gc.collect()
    assert seen() is None
