"""A whole model as sorted arrays, read from an ARPA file and written to one."""

from dlm.estimate.columns.model import MISSING, ModelColumns, OrderColumns, memory_bytes

__all__ = ["MISSING", "ModelColumns", "OrderColumns", "memory_bytes"]
