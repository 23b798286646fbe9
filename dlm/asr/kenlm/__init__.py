"""KenLM's Python API, implemented by dlm: `import dlm.asr.kenlm as kenlm`.

Frameworks that write `import kenlm` themselves get it after `dlm.asr.kenlm.install()`, or if you
start them with `python -m dlm.asr.kenlm script.py ...` (or `-m MODULE ...`, as with Python).
"""

from __future__ import annotations

import sys
import types

from dlm.asr.kenlm.model import ArpaComplaint as ARPALoadComplain
from dlm.asr.kenlm.model import KenlmConfig as Config
from dlm.asr.kenlm.model import KenlmLanguageModel as LanguageModel
from dlm.asr.kenlm.model import KenlmLoadMethod as LoadMethod
from dlm.asr.kenlm.model import KenlmModel as Model
from dlm.asr.kenlm.model import WordScore as FullScoreReturn
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


def install() -> types.ModuleType:
    """Makes `import kenlm` return this module from now on; ImportError if kenlm is already
    imported."""
    here = sys.modules[__name__]
    found = sys.modules.setdefault("kenlm", here)
    if found is not here:
        raise ImportError(
            "the package kenlm is already imported, and its importers will keep using it; call "
            "dlm.asr.kenlm.install() first, or start with `python -m dlm.asr.kenlm script.py`"
        )
    return here
