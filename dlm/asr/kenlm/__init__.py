"""The Python API of KenLM, answered by dlm: `import dlm.asr.kenlm as kenlm`.

Frameworks that write `import kenlm` themselves get it after `dlm.asr.kenlm.install()`, or when they
are started with `python -m dlm.asr.kenlm script.py ...` (`-m MODULE ...`, as Python has it).
"""

from __future__ import annotations

import sys
import types

from dlm.asr.kenlm.batch import NextStates
from dlm.asr.kenlm.config import ArpaComplaint as ARPALoadComplain
from dlm.asr.kenlm.config import KenlmConfig as Config
from dlm.asr.kenlm.config import KenlmLoadMethod as LoadMethod
from dlm.asr.kenlm.config import WordScore as FullScoreReturn
from dlm.asr.kenlm.model import KenlmLanguageModel as LanguageModel
from dlm.asr.kenlm.model import KenlmModel as Model
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
    """From here on `import kenlm` gives this module, to whoever has not imported the other one.

    Raises  ImportError  the package kenlm is in use already: call this first
    """
    here = sys.modules[__name__]
    found = sys.modules.setdefault("kenlm", here)
    if found is not here:
        raise ImportError(
            "the package kenlm is imported already, and what imported it goes on with it; call "
            "dlm.asr.kenlm.install() before, or start with `python -m dlm.asr.kenlm script.py`"
        )
    return here
