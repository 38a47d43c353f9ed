"""Sixteen float32 or int32 numbers side by side, as types that numba's kernels compute with.

What a compiler makes of a plain loop depends on the loop; these operations are what they say on every processor, and a
sum written with `fma` has one order of additions. Arrays are one-dimensional and contiguous; `at` is an index.
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
FOURS = 4 * LANES
BYTES = ir.VectorType(ir.IntType(8), FOURS)
WIDE_BYTES = ir.VectorType(INT, FOURS)


class BFloatType(ir.HalfType):  # type: ignore[misc]
    """LLVM's bfloat16, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(BFloatType(), 2 * LANES)


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


def _splat(builder, number, lanes=FLOATS):
    undefined = ir.Constant(lanes, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def _address(context, builder, array_type, array, at, pointed=FLOATS):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), pointed.as_pointer())


def _load(context, builder, array_type, array_and_at, loaded, align):
    array, at = array_and_at
    value = builder.load(_address(context, builder, array_type, array, at, loaded))
    value.align = align
    return value


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
        return _load(context, builder, sig.args[0], args, FLOATS, 4)

    return LANES_TYPE(array, types.intp), generate


@intrinsic
def load_bfloats(typing, array, at):
    """Of an array of bfloat16 as their bits in uint16."""

    def generate(context, builder, sig, args):
        bits = _load(context, builder, sig.args[0], args, ir.VectorType(ir.IntType(16), LANES), 2)
        return builder.bitcast(builder.shl(builder.zext(bits, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)

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


@intrinsic
def scale(typing, number, lanes):
    """number · lanes; `number` is one float32."""

    def generate(context, builder, sig, args):
        return builder.fmul(_splat(builder, args[0]), args[1])

    return LANES_TYPE(types.float32, LANES_TYPE), generate


@intrinsic
def fma_lanes(typing, a, b, total):
    """a · b + total lane by lane, rounded once."""

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), args)

    return LANES_TYPE(LANES_TYPE, LANES_TYPE, LANES_TYPE), generate


@intrinsic
def splat_int(typing, number):
    """One int32 in all lanes."""

    def generate(context, builder, sig, args):
        return _splat(builder, args[0], INTS)

    return INT_LANES_TYPE(types.int32), generate


@intrinsic
def load_bytes(typing, array, at):
    """64 bytes of a uint8 array."""

    def generate(context, builder, sig, args):
        return _load(context, builder, sig.args[0], args, INTS, 1)

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
def add_byte_dots(typing, total, lanes, array, at):
    """To each lane of `total`: its four unsigned bytes in `lanes` times array[at … at + 3], an int8 array; exact."""

    def generate(context, builder, sig, args):
        four = _load(context, builder, sig.args[2], args[2:], INT, 1)
        others = _splat(builder, four, INTS)
        if has_feature("avx512vnni"):
            kind = ir.FunctionType(INTS, [INTS] * 3)
            dots = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
            return builder.call(dots, [args[0], args[1], others])
        unsigned = builder.zext(builder.bitcast(args[1], BYTES), WIDE_BYTES)
        products = builder.mul(unsigned, builder.sext(builder.bitcast(others, BYTES), WIDE_BYTES))
        total = args[0]
        for byte in range(4):
            every_fourth = ir.Constant(INTS, list(range(byte, FOURS, 4)))
            total = builder.add(total, builder.shuffle_vector(products, products, every_fourth))
        return total

    return INT_LANES_TYPE(INT_LANES_TYPE, INT_LANES_TYPE, array, types.intp), generate


@intrinsic
def subtract_ints(typing, a, b):
    """Lane by lane."""

    def generate(context, builder, sig, args):
        return builder.sub(args[0], args[1])

    return INT_LANES_TYPE(INT_LANES_TYPE, INT_LANES_TYPE), generate


@intrinsic
def to_floats(typing, lanes):
    """The nearest float32 of each int32."""

    def generate(context, builder, sig, args):
        return builder.sitofp(args[0], FLOATS)

    return LANES_TYPE(INT_LANES_TYPE), generate


@intrinsic
def add_pair_dots(typing, total, array, at, others, at_others):
    """To each lane of `total`: two bfloat16 of `array` [at …] times the two at others[at_others …], as the processor's
    instruction for it rounds. Both are bits in uint16. Needs the feature avx512bf16.
    """

    def generate(context, builder, sig, args):
        pairs = builder.bitcast(_load(context, builder, sig.args[1], args[1:3], INTS, 2), PAIRS)
        two = _load(context, builder, sig.args[3], args[3:5], INT, 2)
        same = builder.bitcast(_splat(builder, two, INTS), PAIRS)
        kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
        dots = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(dots, [args[0], pairs, same])

    return LANES_TYPE(LANES_TYPE, array, types.intp, others, types.intp), generate


@intrinsic
def add_lanes(typing, a, b):
    """Lane by lane."""

    def generate(context, builder, sig, args):
        return builder.fadd(args[0], args[1])

    return LANES_TYPE(LANES_TYPE, LANES_TYPE), generate
