"""Modules for decoders that are not installed say what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("dlm.asr.decoders.flashlight", "flashlight", "pip install flashlight-text"),
    ],
)
def test_an_import_says_what_to_install(
    module: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ModuleNotFoundError still, of the same name, so that programs may try another decoder."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match=command) as caught:
        importlib.import_module(module)
    assert (caught.value.name or "").split(".")[0] == package
