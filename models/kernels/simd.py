"""Sixteen float32 or int32 numbers side by side, as types that numba's kernels compute with.

What a compiler makes of a plain loop depends on the loop; these operations are what they say on every processor. Arrays
are one-dimensional and contiguous; `at` is an index.
"""

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

INT = ir.IntType(32)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(INT, LANES)


def has_feature(name: str) -> bool:
    """Whether the processor that is compiled for has it, by LLVM's name."""
    named = numba.config.CPU_FEATURES
    return f"+{name}" in named.split(",") if named is not None else bool(binding.get_host_cpu_features().get(name))


class Lanes(types.Type):  # type: ignore[misc]
    """numba's type of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


class IntLanes(types.Type):  # type: ignore[misc]
    """numba's type of sixteen int32; each is also four bytes, the first the lowest."""

    def __init__(self) -> None:
        super().__init__(name="IntLanes")


LANES_TYPE, INT_LANES_TYPE = Lanes(), IntLanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, FLOATS)


@register_model(IntLanes)
class IntLanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, INTS)


def splat_value(builder, number, lanes=FLOATS):
    undefined = ir.Constant(lanes, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def address(context, builder, array_type, array, at, pointed=FLOATS):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), pointed.as_pointer())


def load_value(context, builder, array_type, array_and_at, loaded, align):
    array, at = array_and_at
    value = builder.load(address(context, builder, array_type, array, at, loaded))
    value.align = align
    return value


@intrinsic
def load(typing, array, at):
    """Of a float32 array."""

    def generate(context, builder, sig, args):
        return load_value(context, builder, sig.args[0], args, FLOATS, 4)

    return LANES_TYPE(array, types.intp), generate


@intrinsic
def load_bfloats(typing, array, at):
    """Of an array of bfloat16 as their bits in uint16."""

    def generate(context, builder, sig, args):
        bits = load_value(context, builder, sig.args[0], args, ir.VectorType(ir.IntType(16), LANES), 2)
        return builder.bitcast(builder.shl(builder.zext(bits, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)

    return LANES_TYPE(array, types.intp), generate


@intrinsic
def store(typing, array, at, lanes):
    """Into a float32 array."""

    def generate(context, builder, sig, args):
        stored = builder.store(args[2], address(context, builder, sig.args[0], args[0], args[1]))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES_TYPE), generate


@intrinsic
def maximum(typing, a, b):
    """Lane by lane; neither may hold a NaN."""

    def generate(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return LANES_TYPE(LANES_TYPE, LANES_TYPE), generate


@intrinsic
def load_bytes(typing, array, at):
    """64 bytes of an array of any type."""

    def generate(context, builder, sig, args):
        return load_value(context, builder, sig.args[0], args, INTS, 1)

    return INT_LANES_TYPE(array, types.intp), generate


@intrinsic
def low_halves(typing, lanes):
    """The lower four bits of each byte."""

    def generate(context, builder, sig, args):
        return builder.and_(args[0], ir.Constant(INTS, [0x0F0F0F0F] * LANES))

    return INT_LANES_TYPE(INT_LANES_TYPE), generate


@intrinsic
def high_halves(typing, lanes):
    """The upper four bits of each byte."""

    def generate(context, builder, sig, args):
        return builder.and_(
            builder.lshr(args[0], ir.Constant(INTS, [4] * LANES)), ir.Constant(INTS, [0x0F0F0F0F] * LANES)
        )

    return INT_LANES_TYPE(INT_LANES_TYPE), generate


@intrinsic
def prefetch(typing, array, at):
    """Have the 64 bytes there come to the second cache; `at` may be past the end."""

    def generate(context, builder, sig, args):
        place = address(context, builder, sig.args[0], args[0], args[1], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [place.type, INT, INT, INT])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for_reading, second_cache, data = ir.Constant(INT, 0), ir.Constant(INT, 2), ir.Constant(INT, 1)
        builder.call(fetch, [place, for_reading, second_cache, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
