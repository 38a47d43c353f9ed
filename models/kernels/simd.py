"""Sixteen float32 numbers side by side, as a type that numba's kernels compute with.

What a compiler makes of a plain loop depends on the loop; these operations are what they say on every processor, and a
sum written with `fma` has one order of additions. Arrays are one-dimensional and contiguous; `at` is an index.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)


class Lanes(types.Type):  # type: ignore[misc]
    """numba's type of one vector."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = Lanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, FLOATS)


def _splat(builder, number):
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def _address(context, builder, array_type, array, at):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), FLOATS.as_pointer())


@intrinsic
def splat(typing, number):
    """One float32 in all lanes."""

    def generate(context, builder, sig, args):
        return _splat(builder, args[0])

    return LANES_TYPE(types.float32), generate


@intrinsic
def load(typing, array, at):
    """Of a float32 array."""

    def generate(context, builder, sig, args):
        loaded = builder.load(_address(context, builder, sig.args[0], args[0], args[1]))
        loaded.align = 4
        return loaded

    return LANES_TYPE(array, types.intp), generate


@intrinsic
def store(typing, array, at, lanes):
    """Into a float32 array."""

    def generate(context, builder, sig, args):
        stored = builder.store(args[2], _address(context, builder, sig.args[0], args[0], args[1]))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES_TYPE), generate


@intrinsic
def fma(typing, number, lanes, total):
    """number · lanes + total, rounded once; `number` is one float32."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(function, [_splat(builder, args[0]), args[1], args[2]])

    return LANES_TYPE(types.float32, LANES_TYPE, LANES_TYPE), generate


@intrinsic
def maximum(typing, a, b):
    """Lane by lane; neither may hold a NaN."""

    def generate(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return LANES_TYPE(LANES_TYPE, LANES_TYPE), generate
