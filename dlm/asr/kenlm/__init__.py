"""KenLM's Python API, implemented by dlm: `import dlm.asr.kenlm as kenlm`.

Frameworks that themselves import kenlm (or pyctcdecode) get dlm's module after `install()`, or if
you start them with `python -m dlm.asr.kenlm script.py ...` (or `-m MODULE ...`, as with Python).
"""

from __future__ import annotations

import sys
import types
from importlib import import_module

from dlm.asr.kenlm.model import (
    ArpaComplaint as ARPALoadComplain,
    KenlmConfig as Config,
    KenlmLanguageModel as LanguageModel,
    KenlmLoadMethod as LoadMethod,
    KenlmModel as Model,
    WordScore as FullScoreReturn,
)
from dlm.asr.kenlm.opened import NextStates
from dlm.asr.kenlm.state import KenlmState as State

__all__ = [
    "ARPALoadComplain",
    "Config",
    "FullScoreReturn",
    "LanguageModel",
    "LoadMethod",
    "Model",
    "NextStates",
    "State",
    "install",
]


# Names that other packages import, and the modules that they then get instead.
_MODULES = {
    "kenlm": "dlm.asr.kenlm",
    "pyctcdecode": "dlm.asr.ctc",
    "pyctcdecode.alphabet": "dlm.asr.decoders.labels",
    "pyctcdecode.constants": "dlm.asr.decoders.beams",
}


def install(*packages: str) -> types.ModuleType:
    """Makes `import kenlm` give this module, and `import pyctcdecode` give `dlm.asr.ctc`; replaces
    only `packages` if any are given. Raises ImportError if one of them is already imported."""
    for name, ours in _MODULES.items():
        package = name.partition(".")[0]
        if package in (packages or _MODULES):
            module = import_module(ours)
            if sys.modules.setdefault(name, module) is not module:
                raise ImportError(
                    f"the package {package} is already imported, and its importers will keep using "
                    "it; call dlm.asr.kenlm.install() first, or start with `python -m "
                    "dlm.asr.kenlm script.py`"
                )
    return sys.modules[__name__]
