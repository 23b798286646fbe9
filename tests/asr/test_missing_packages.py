"""Modules for decoders that are not installed say what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_an_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ModuleNotFoundError still, of the same name, so that programs may try another decoder."""
    package, module = "flashlight", "dlm.asr.decoders.flashlight"
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install flashlight-text") as caught:
        importlib.import_module(module)
    assert (caught.value.name or "").split(".")[0] == package
