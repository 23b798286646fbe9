"""Whether an object is unchanged since it was made; records cannot vouch for a changed one.

    @sealed                     # on the class, above all other decorators
    class Engine:
        def __init__(self): ...; note_made(self)
    changes(engine)             # names of what was replaced, in the object or in its class

In Python anybody can replace a method of an object or of a class. Both are detected here. Functions
that a method calls, and the insides of attributes, are not checked: somebody who changes those
could change this file, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
_CACHED_BY_PYTHON = {"__slotnames__"}  # pickle caches it in a class

_GONE = object()  # for a dead reference; None may have replaced the object

_as_defined: dict[type, Mapping[str, object]] = {}
_as_made: weakref.WeakKeyDictionary[object, Mapping[str, Callable[[], Any]]] = (
    weakref.WeakKeyDictionary()
)


def sealed(kind: Class) -> Class:
    """Remembers the definition of a class; does not change it."""
    _as_defined[kind] = dict(vars(kind))
    return kind


def note_made(part: object) -> None:
    """Remembers the attributes of an object; call it at the end of `__init__`."""
    _as_made[part] = {name: _reference(value) for name, value in vars(part).items()}


def _reference(value: object) -> Callable[[], Any]:
    """A weak reference where possible: a strong one to an object that refers back to its owner
    would keep the owner alive."""
    try:
        found = weakref.ref(value)
    except TypeError:  # a number, a tuple
        return lambda: value
    return lambda: _GONE if found() is None else found()


def class_changes(kind: type) -> list[str]:
    """Names added to or changed in a sealed class or its bases."""
    found: set[str] = set()
    for place in kind.__mro__[:-1]:
        before, now = _as_defined.get(place, {}), vars(place)
        names = (before.keys() | now.keys()) - _CACHED_BY_PYTHON
        found |= {n for n in names if n not in before or now.get(n, before) is not before[n]}
    return sorted(found)


def changes(part: object) -> list[str]:
    """Names added to or changed in an object or its class since it was made.

    Without a call of `note_made`, all attributes of an object count as changed.
    """
    made, now = _as_made.get(part, {}), vars(part)
    own = {n for n in made.keys() | now.keys() if n not in made or not _is_same(made[n], now, n)}
    return sorted({*own, *class_changes(type(part))})


def _is_same(made: Callable[[], Any], now: Mapping[str, object], name: str) -> bool:
    return name in now and made() is now[name]
