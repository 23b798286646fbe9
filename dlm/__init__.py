"""dlm serves n-gram language models from many machines, with exact scores.

    from dlm import AsyncClient, Client, ClientConfig, LocalModel

These names are imported on first use, so `import dlm` itself stays light.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm.client import AsyncClient, Client, ClientConfig
    from dlm.index.search.local import LocalModel

# gRPC reads this variable when it is imported. gRPC's own log lines on standard error cite its
# source code; dlm itself raises, logs or shows what they say about a server. Set the variable to
# `info` to see gRPC's lines as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.3.0"
__all__ = ["AsyncClient", "Client", "ClientConfig", "LocalModel", "__version__"]

_LIES_IN = {
    "AsyncClient": "dlm.client",
    "Client": "dlm.client",
    "ClientConfig": "dlm.client",
    "LocalModel": "dlm.index.search.local",
}


def __getattr__(name: str) -> Any:
    if name not in _LIES_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LIES_IN[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
