"""Accesses memory by address, an int64; kernels read mapped files and packed bits in this way.

A field has at most 57 bits: with a shift of up to seven it still lies in one eight-byte load.
Passing arrays would count references, which costs more than most functions here do.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dlm.jit import inlined

_ONE = np.int64(1)


def _loading(result: Any, stored: Any, align: int) -> Any:
    """Makes an intrinsic that reads the value at an address, and widens narrower integers."""

    @intrinsic
    def load(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(args[0], stored.as_pointer())
            found = builder.load(pointer, align=align)
            return builder.zext(found, _INT64) if stored in (_INT8, _INT32) else found

        return result(types.int64), codegen

    return load


def _storing(value: Any, stored: Any, align: int) -> Any:
    """Makes an intrinsic that writes a value, or an int64's low bits, at an address."""

    @intrinsic
    def store(typingctx, address, value_type):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(args[0], stored.as_pointer())
            written = builder.trunc(args[1], stored) if stored == _INT32 else args[1]
            builder.store(written, pointer, align=align)
            return context.get_dummy_value()

        return types.void(types.int64, value), codegen

    return store


_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
# `load8` and `load64` take any address; the others take one aligned to the size of the value.
load8 = _loading(types.int64, _INT8, 1)
load32 = _loading(types.int64, _INT32, 4)
load64 = _loading(types.int64, _INT64, 1)
load_float32 = _loading(types.float32, ir.FloatType(), 4)
store32 = _storing(types.int64, _INT32, 4)
store64 = _storing(types.int64, _INT64, 8)
store_float32 = _storing(types.float32, ir.FloatType(), 4)


@intrinsic
def bits_of_float32(typingctx, value):  # type: ignore[no-untyped-def]
    """The bits of a float32, as a non-negative int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.zext(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), codegen


@intrinsic
def multiply_high(typingctx, a, b):  # type: ignore[no-untyped-def]
    """The upper 64 bits of the product of two numbers, all as unsigned."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Prefetches the cache line at `address`; harmless at any address."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        byte_pointer = ir.IntType(8).as_pointer()
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], function_type)
        pointer = builder.inttoptr(args[0], byte_pointer)
        builder.call(function, [pointer, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def as_float32(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 whose bits are the low 32 of `bits`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        low = builder.trunc(args[0], ir.IntType(32))
        return builder.bitcast(low, ir.FloatType())

    return types.float32(types.int64), codegen


def _counting(emit: Callable[[Any, Any], Any]) -> Any:
    """Makes an intrinsic of one instruction on an int64."""

    @intrinsic
    def count(typingctx, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return emit(builder, args[0])

        return types.int64(types.int64), codegen

    return count


# `leading_zeros` and `trailing_zeros` give 64 for 0; `ones_in` counts the 1s, and `mirrored_32`
# puts the low 32 bits in reverse order.
leading_zeros = _counting(lambda builder, x: builder.ctlz(x, ir.IntType(1)(0)))
trailing_zeros = _counting(lambda builder, x: builder.cttz(x, ir.IntType(1)(0)))
ones_in = _counting(lambda builder, x: builder.ctpop(x))
mirrored_32 = _counting(
    lambda builder, x: builder.zext(builder.bitreverse(builder.trunc(x, _INT32)), _INT64)
)


@inlined
def mirrored(number, bits):  # type: ignore[no-untyped-def]
    """A number of `bits` bits, 1 to 32, with its bits in reverse order."""
    return mirrored_32(number) >> (np.int64(32) - bits)


@inlined
def mask_of(width):  # type: ignore[no-untyped-def]
    return (_ONE << width) - _ONE


@inlined
def of(numbers, place):  # type: ignore[no-untyped-def]
    """The number at index `place` of the array of int64 at the address `numbers`."""
    return load64(numbers + (np.int64(place) << np.int64(3)))


@inlined
def get(address, bit, width):  # type: ignore[no-untyped-def]
    """The field of `width` bits that begins at bit `bit` of the column at `address`."""
    return (load64(address + (bit >> np.int64(3))) >> (bit & np.int64(7))) & mask_of(width)


@inlined
def field(bit, width):  # type: ignore[no-untyped-def]
    return (load64(bit >> np.int64(3)) >> (bit & np.int64(7))) & mask_of(width)


@inlined
def two_fields(bit, width):  # type: ignore[no-untyped-def]
    """The field of `width` bits, 28 at most, that begins at `bit`, and the field after it."""
    x = load64(bit >> np.int64(3)) >> (bit & np.int64(7))
    mask = mask_of(width)
    return x & mask, (x >> width) & mask


@inlined
def bit_length(value):  # type: ignore[no-untyped-def]
    return np.int64(64) - leading_zeros(value)
