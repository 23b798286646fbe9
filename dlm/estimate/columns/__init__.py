"""A whole model as sorted arrays, read from an ARPA file or written to one."""

from dlm.estimate.columns.model import SORT_BYTES, ModelColumns
from dlm.estimate.columns.orders import (
    MISSING,
    PARSER_BYTES,
    WORD_BYTES,
    OrderColumns,
    memory_bytes,
)
from dlm.estimate.columns.text import lay_out, log10_probs

__all__ = [
    "MISSING",
    "PARSER_BYTES",
    "SORT_BYTES",
    "WORD_BYTES",
    "ModelColumns",
    "OrderColumns",
    "lay_out",
    "log10_probs",
    "memory_bytes",
]
