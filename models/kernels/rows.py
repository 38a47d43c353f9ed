"""Operations on several rows at once, so that each weight that is loaded serves all of them.

What rows have of their own is a tuple with an entry for each; where an argument is no tuple, all share it. A kernel
written so is compiled for every length of tuple that it is called with, and computes a row alike in all of them.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from models.kernels.simd import FLOATS, INT, INT_LANES_TYPE, INTS, LANES, LANES_TYPE, has_feature, splat_value

AT_ONCE = 8
"""Two sums of each, a weight and an input fit into 32 registers."""

NUM_BYTES = 4 * LANES
BYTES = ir.VectorType(ir.IntType(8), NUM_BYTES)
WIDE_BYTES = ir.VectorType(INT, NUM_BYTES)


class BFloatType(ir.HalfType):  # type: ignore[misc]
    """LLVM's bfloat16, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(BFloatType(), 2 * LANES)


@njit(nogil=True, cache=True, error_model="numpy")
def four(first, last):
    """Numbers of rows from `first` on; past `last` it is that one again, which costs less than rows one by one."""
    return first, min(first + 1, last), min(first + 2, last), min(first + 3, last)


@njit(nogil=True, cache=True, error_model="numpy")
def eight(first, last):
    """As `four`."""
    a, b, c, d = four(first, last)
    e, f, g, h = four(min(first + 4, last), last)
    return a, b, c, d, e, f, g, h


@njit(nogil=True, cache=True, error_model="numpy")
def shares(panel, turn, num_rows):
    """What each pass over a panel fetches of the next one, in all and in each turn; both given in items.

    Else memory would idle while all passes but the first compute. A single pass keeps it busy by itself: 0, 0.
    """
    passes = (num_rows + AT_ONCE - 1) // AT_ONCE
    return (panel // passes, turn // passes) if passes > 1 else (0, 0)


def _for_each(build):
    """Generates a tuple: `build` gets the builder and the arguments, of tuples a row's entry."""

    def generate(context, builder, sig, args):
        def own(arg, kind, row):
            return builder.extract_value(arg, row) if isinstance(kind, types.UniTuple) else arg

        kinds = list(zip(args, sig.args, strict=True))
        rows = range(sig.return_type.count)
        made = [build(builder, *(own(arg, kind, row) for arg, kind in kinds)) for row in rows]
        return context.make_tuple(builder, sig.return_type, made)

    return generate


def _call(builder, name, returned, *args):
    kind = ir.FunctionType(returned, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fma(builder, a, b, total):
    return _call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, total)


@intrinsic
def zeros(typing, rows):
    """As many as `rows` has entries."""
    return types.UniTuple(LANES_TYPE, rows.count)(rows), _for_each(lambda *_: ir.Constant(FLOATS, [0.0] * LANES))


@intrinsic
def int_zeros(typing, rows):
    """As `zeros`."""
    return types.UniTuple(INT_LANES_TYPE, rows.count)(rows), _for_each(lambda *_: ir.Constant(INTS, [0] * LANES))


@intrinsic
def pick(typing, array, rows, at):
    """array[row, at] of each row."""

    def generate(context, builder, sig, args):
        array_type, (array, rows, at) = sig.args[0], args
        made = context.make_array(array_type)(context, builder, array)

        def read(row):
            return builder.load(cgutils.get_item_pointer(context, builder, array_type, made, [row, at]))

        values = [read(builder.extract_value(rows, i)) for i in range(sig.return_type.count)]
        return context.make_tuple(builder, sig.return_type, values)

    return types.UniTuple(array.dtype, rows.count)(array, rows, types.intp), generate


@intrinsic
def put(typing, array, rows, at, totals):
    """totals → array[row, at : at + LANES] of each row; array float32."""

    def generate(context, builder, sig, args):
        array_type, (array, rows, at, totals) = sig.args[0], args
        made = context.make_array(array_type)(context, builder, array)
        for i in range(sig.args[3].count):
            indices = [builder.extract_value(rows, i), at]
            place = cgutils.get_item_pointer(context, builder, array_type, made, indices)
            stored = builder.store(builder.extract_value(totals, i), builder.bitcast(place, FLOATS.as_pointer()))
            stored.align = 4
        return context.get_dummy_value()

    return types.void(array, rows, types.intp, totals), generate


@intrinsic
def splat_ints(typing, numbers):
    """Each row's int32 in all lanes."""
    returned = types.UniTuple(INT_LANES_TYPE, numbers.count)
    return returned(numbers), _for_each(lambda builder, number: splat_value(builder, number, INTS))


@intrinsic
def to_floats(typing, ints):
    """The nearest float32 of each int32."""
    returned = types.UniTuple(LANES_TYPE, ints.count)
    return returned(ints), _for_each(lambda builder, lanes: builder.sitofp(lanes, FLOATS))


@intrinsic
def add(typing, a, b):
    return a(a, b), _for_each(lambda builder, one, other: builder.fadd(one, other))


@intrinsic
def scale(typing, numbers, lanes):
    """A row's float32 · lanes."""
    returned = types.UniTuple(LANES_TYPE, numbers.count)
    return returned(numbers, lanes), _for_each(lambda b, number, all_: b.fmul(splat_value(b, number), all_))


@intrinsic
def fma(typing, numbers, lanes, totals):
    """A row's float32 · lanes + its total, rounded once."""

    def build(builder, number, lanes, total):
        return _fma(builder, splat_value(builder, number), lanes, total)

    return totals(numbers, lanes, totals), _for_each(build)


@intrinsic
def fma_lanes(typing, a, b, totals):
    """a · b + total lane by lane, rounded once."""
    return totals(a, b, totals), _for_each(_fma)


@intrinsic
def add_pair_dots(typing, totals, weights, inputs):
    """To each lane: its two bfloat16 in `weights` times the two in `inputs`, as the processor's instruction for it
    rounds. Needs the feature avx512bf16.
    """

    def build(builder, total, *operands):
        pairs = [builder.bitcast(operand, PAIRS) for operand in operands]
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)

    return totals(totals, weights, inputs), _for_each(build)


@intrinsic
def add_byte_dots(typing, totals, weights, inputs):
    """To each lane: its four unsigned bytes in `weights` times the four signed ones in `inputs`; exact."""

    def build(builder, total, weights, inputs):
        if has_feature("avx512vnni"):
            return _call(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, weights, inputs)
        unsigned = builder.zext(builder.bitcast(weights, BYTES), WIDE_BYTES)
        products = builder.mul(unsigned, builder.sext(builder.bitcast(inputs, BYTES), WIDE_BYTES))
        for byte in range(4):
            every_fourth = ir.Constant(INTS, list(range(byte, NUM_BYTES, 4)))
            total = builder.add(total, builder.shuffle_vector(products, products, every_fourth))
        return total

    return totals(totals, weights, inputs), _for_each(build)
