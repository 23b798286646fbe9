"""Whether an object of ours is as it was made: what was changed since, no record can speak of.

    @sealed                     # on the class, above all other decorators
    class Engine:
        def __init__(self): ...; note_made(self)
    changes(engine)             # names of what was replaced, in the object or in its class

Python lets anybody put another function in the place of a method, of one object or of a class. Both
are found here. A function that a method calls, and what an attribute holds inside, are not looked
at: who changes those could change this file, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
_CACHED_BY_PYTHON = {"__slotnames__"}  # pickle notes it in a class

_GONE = object()  # for what is no longer there; None may have taken its place

_as_defined: dict[type, Mapping[str, object]] = {}
_as_made: weakref.WeakKeyDictionary[object, Mapping[str, Callable[[], Any]]] = (
    weakref.WeakKeyDictionary()
)


def sealed(kind: Class) -> Class:
    """Notes what a class is defined with; the class itself stays as it is."""
    _as_defined[kind] = dict(vars(kind))
    return kind


def note_made(part: object) -> None:
    """Notes the attributes of an object, at the end of its `__init__`."""
    _as_made[part] = {name: _reference(value) for name, value in vars(part).items()}


def _reference(value: object) -> Callable[[], Any]:
    """What gives the same object for as long as it lives: kept alive, one that leads back to its
    owner would keep that alive."""
    try:
        found = weakref.ref(value)
    except TypeError:  # a number, a tuple
        return lambda: value
    return lambda: _GONE if found() is None else found()


def class_changes(kind: type) -> list[str]:
    """Names that a sealed class, or one that it is derived from, did not have or had otherwise."""
    found: set[str] = set()
    for place in kind.__mro__[:-1]:
        before, now = _as_defined.get(place, {}), vars(place)
        names = (before.keys() | now.keys()) - _CACHED_BY_PYTHON
        found |= {n for n in names if n not in before or now.get(n, before) is not before[n]}
    return sorted(found)


def changes(part: object) -> list[str]:
    """Names of what an object, or its class, did not have or had otherwise when it was made.

    An object that `note_made` was not called with has all of its attributes changed.
    """
    made, now = _as_made.get(part, {}), vars(part)
    own = {n for n in made.keys() | now.keys() if n not in made or not _is_same(made[n], now, n)}
    return sorted({*own, *class_changes(type(part))})


def _is_same(made: Callable[[], Any], now: Mapping[str, object], name: str) -> bool:
    return name in now and made() is now[name]
