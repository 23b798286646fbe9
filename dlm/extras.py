"""Advice on installing the packages of one of dlm's extras. dlm is not on a package index, and its
sources may be gone, so it is safest to name the packages themselves."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

_OF_EXTRA = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[\w-]+)["']""")


def packages_of(extra: str) -> list[str]:
    """The packages of the extra, as pip expects them; from the metadata of the running dlm."""
    try:
        lines = requires("dlm") or []
    except PackageNotFoundError:  # dlm runs from its sources and was never installed
        return [f"{Path(__file__).parents[1]}[{extra}]"]
    found = [_OF_EXTRA.match(line) for line in lines]
    return [one["package"] for one in found if one is not None and one["extra"] == extra]


def needed(missing: ModuleNotFoundError, packages: list[str]) -> ModuleNotFoundError:
    """Returns an error like `missing`, with advice on what to install."""
    return ModuleNotFoundError(
        f"this module needs {missing.name}, which is not installed; run\n  {pip_install(packages)}",
        name=missing.name,
        path=missing.path,
    )


def pip_install(packages: list[str]) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])
