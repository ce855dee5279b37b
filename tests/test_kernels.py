"""The building blocks of the CPU kernels against numpy, in poisoned memory."""

import ctypes
import importlib
import math
import mmap
import platform
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cases import thinned
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from openrnn.kernels.cpu import elementwise, packing, product
from openrnn.kernels.cpu.product import LANES, PANEL

DTYPES = ("float32", "float64")
SIZES = (1, 2, 3, 5, 7, 11, 13, 15, 16, 17, 18, 31, 32, 33, 64, 97)
TASKS = 2
ROWS = (*range(14), 16, 17, 21, 37)

TWO_ULP, MORE_ULP = 2, 2.5


def noise(dtype, *shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def placed(values, *strides):
    """The values with these strides, in elements, and with nan between and around them."""
    extents = [stride * (n - 1) for stride, n in zip(strides, values.shape)]
    memory = np.full(sum(extents) + 201, np.nan, values.dtype)
    bytes_ = [stride * values.itemsize for stride in strides]
    view = np.lib.stride_tricks.as_strided(memory[100:], values.shape, bytes_)
    view[...] = values
    return memory, view


def address(view):
    return view.__array_interface__["data"][0]


def at_the_edge(values):
    """A copy of the values whose end is the end of the memory that this process may read."""
    page, size = mmap.PAGESIZE, -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + page), "uint8")
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(address(memory) + size), page, 0) == 0
    view = memory[size - values.nbytes : size].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


def close(found, wanted, terms, magnitude):
    """Within the bound on the error of a sum of so many terms, of the sum of their magnitudes."""
    bound = (terms + 2) * np.finfo(found.dtype).eps * magnitude
    np.testing.assert_array_less(np.abs(found - wanted), bound + np.finfo(found.dtype).tiny)


def untouched(memory, *views):
    """Whether all memory outside the views is still nan; spoils the views."""
    for view in views:
        view[...] = np.nan
    return np.isnan(memory).all()


def check_product(dtype, rows, inner, panels, transposed, plain, accumulate):
    width = PANEL[dtype]
    columns = panels * width
    a, b = noise(dtype, rows, inner), noise(dtype, inner, columns, seed=1)
    c = noise(dtype, rows, columns, seed=2)
    a_strides = (1, rows + 3) if transposed else (inner + 3, 1)
    _, a_placed = placed(a, *a_strides)
    b_strides = (columns + 5, width) if plain else (width + 3, (width + 3) * inner + 7)
    _, b_placed = placed(b.reshape(inner, panels, width), *b_strides, 1)
    memory, c_placed = placed(c, columns + 9, 1)
    if not accumulate:
        c_placed[...], c = np.nan, 0 * c
    getattr(product, f"product_{dtype}")(
        (rows, inner, columns), (address(a_placed), *a_strides), (address(b_placed), *b_strides),
        (address(c_placed), columns + 9), accumulate, inner % 2 == 1,
    )  # fmt: skip
    a, b, c = (np.asarray(each, "longdouble") for each in (a, b, c))
    close(c_placed, a @ b + c, inner, abs(a) @ abs(b) + abs(c))
    assert untouched(memory, c_placed)


def check_dots(dtype, rows, inner, gates, units, padding, part, accumulate):
    padded, chosen = units + padding, slice(*part)
    c_row = gates * padded + 7
    a, w = noise(dtype, rows, inner), noise(dtype, gates, units, inner, seed=1)
    c = noise(dtype, rows, gates, units, seed=2)[:, :, chosen]
    _, a_placed = placed(a, inner + 3, 1)
    _, w_placed = placed(w, units * (inner + 5), inner + 5, 1)
    memory, c_whole = placed(np.full((rows, gates, units), np.nan, dtype), c_row, padded, 1)
    c_placed = c_whole[:, :, chosen]
    if accumulate:
        c_placed[...] = c
    else:
        c = 0 * c
    getattr(product, f"dots_{dtype}")(
        (rows, inner), (gates, units, padded), part, (address(a_placed), inner + 3),
        (address(w_placed), inner + 5), (address(c_whole), c_row), accumulate, inner % 2 == 1,
    )  # fmt: skip
    a, w, c = (np.asarray(each, "longdouble") for each in (a, w[:, chosen], c))
    magnitude = np.einsum("ik,guk->igu", abs(a), abs(w)) + abs(c)
    close(c_placed, np.einsum("ik,guk->igu", a, w) + c, inner, magnitude)
    assert untouched(memory, c_placed)


def check_pack_transposed(dtype, gates, units, padding, inner):
    padded = units + padding
    panels = -(-gates * padded // PANEL[dtype])
    w = noise(dtype, gates, units, inner)
    _, w_placed = placed(w, units * (inner + 5), inner + 5, 1)
    memory, out = placed(np.full(panels * inner * PANEL[dtype], np.nan, dtype), 1)
    for task in range(TASKS):
        getattr(packing, f"pack_transposed_{dtype}")(
            address(w_placed), units, gates, inner, inner + 5, address(out), padded, task, TASKS
        )
    wanted = np.zeros((panels * PANEL[dtype], inner), dtype)
    wanted[: gates * padded].reshape(gates, padded, inner)[:, :units] = w
    wanted = wanted.reshape(panels, PANEL[dtype], inner).swapaxes(1, 2)
    np.testing.assert_array_equal(out.reshape(wanted.shape), wanted)
    assert untouched(memory, out)


def check_pack_plain(dtype, gates, units, padding, columns):
    padded = units + padding
    panels = -(-columns // PANEL[dtype])
    w = noise(dtype, gates, units, columns)
    _, w_placed = placed(w, units * (columns + 5), columns + 5, 1)
    memory, out = placed(np.full(panels * gates * padded * PANEL[dtype], np.nan, dtype), 1)
    for task in range(TASKS):
        getattr(packing, f"pack_plain_{dtype}")(
            address(w_placed), gates, units, padded, columns, columns + 5, address(out), task, TASKS
        )
    wanted = np.zeros((gates, padded, panels * PANEL[dtype]), dtype)
    wanted[:, :units, :columns] = w
    wanted = wanted.reshape(gates * padded, panels, PANEL[dtype]).swapaxes(0, 1)
    np.testing.assert_array_equal(out.reshape(wanted.shape), wanted)
    assert untouched(memory, out)


def check_narrower():
    """What a process with narrower vectors runs, see test_widths."""
    for dtype in DTYPES:
        for rows in ROWS:
            check_product(dtype, rows, 18, 7, False, False, rows % 2 == 0)
            check_dots(dtype, rows, 2 * LANES[dtype] + 1, 3, 18, 2, (1, 17), rows % 2 == 0)
        for inner in (1, 18, 33):
            check_pack_transposed(dtype, 3, 18, 2, inner)
            check_pack_plain(dtype, 3, 18, 2, inner)


sizes, dtypes = st.sampled_from(SIZES), st.sampled_from(DTYPES)


@pytest.mark.parametrize("rows", ROWS)
@given(dtypes, sizes | st.just(0), st.integers(0, 9), st.booleans(), st.booleans(), st.booleans())
def test_product(rows, dtype, inner, panels, transposed, plain, accumulate):
    check_product(dtype, rows, inner, panels, transposed, plain, accumulate)


@pytest.mark.parametrize("rows", ROWS)
@given(dtypes, sizes | st.just(0), st.integers(1, 4), sizes, st.integers(0, 9), st.data())
def test_dots(rows, dtype, inner, gates, units, padding, data):
    part = sorted([data.draw(st.integers(0, units)), data.draw(st.integers(0, units))])
    check_dots(dtype, rows, inner, gates, units, padding, tuple(part), data.draw(st.booleans()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_product(dtype):
    check_product(dtype, 16, 650, 2624 // PANEL[dtype], False, False, False)
    check_dots(dtype, 8, 650, 4, 650, 6, (0, 650), True)


@given(dtypes, st.integers(1, 4), sizes, st.integers(0, 9), sizes | st.just(0))
def test_pack_transposed(dtype, gates, units, padding, inner):
    check_pack_transposed(dtype, gates, units, padding, inner)


@given(dtypes, st.integers(1, 4), sizes, st.integers(0, 9), sizes)
def test_pack_plain(dtype, gates, units, padding, columns):
    check_pack_plain(dtype, gates, units, padding, columns)


@pytest.mark.skipif(sys.platform == "win32", reason="asks for protected pages as POSIX does")
@given(dtypes, st.integers(1, 12), sizes, sizes)
def test_nothing_is_read_past_the_end(dtype, rows, units, inner):
    """A read past the end of a, b or w would kill this process."""
    columns = -(-units // PANEL[dtype]) * PANEL[dtype]
    a, w = (at_the_edge(noise(dtype, n, inner)) for n in (rows, units))
    b, c = at_the_edge(np.empty((inner, columns), dtype)), np.empty((rows, columns), dtype)
    call = {
        name: getattr(room, f"{name}_{dtype}")
        for name, room in [
            ("pack_plain", packing), ("pack_transposed", packing),
            ("product", product), ("dots", product),
        ]
    }  # fmt: skip
    call["pack_transposed"](address(w), units, 1, inner, inner, address(b), units, 0, 1)
    packed = PANEL[dtype], inner * PANEL[dtype]
    call["product"](
        (rows, inner, columns), (address(a), inner, 1), (address(b), *packed),
        (address(c), columns), False, True,
    )  # fmt: skip
    close(c[:, :units], a @ w.T, inner, abs(a) @ abs(w.T))
    call["dots"](
        (rows, inner), (1, units, units), (0, units), (address(a), inner), (address(w), inner),
        (address(c), columns), False, True,
    )  # fmt: skip
    close(c[:, :units], a @ w.T, inner, abs(a) @ abs(w.T))
    panels = -(-inner // PANEL[dtype])
    b = at_the_edge(np.empty((panels, units, PANEL[dtype]), dtype))
    call["pack_plain"](address(w), 1, units, units, inner, inner, address(b), 0, 1)
    np.testing.assert_array_equal(b.swapaxes(0, 1).reshape(units, -1)[:, :inner], w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    """However rows, columns and units are split, and from either end, bits are the same."""
    rows, inner, units, width = 37, 97, 3 * PANEL[dtype], PANEL[dtype]
    a, w, b = noise(dtype, rows, inner), noise(dtype, units, inner), noise(dtype, 3, inner, width)
    whole, parts = np.zeros((2, 2, rows, units), dtype)
    multiply, dots = (getattr(product, f"{name}_{dtype}") for name in ("product", "dots"))
    b_strides = (width, inner * width)

    def both(c, first, last, low, high, backwards=False):
        a_part, c_part = a[first:last], c[:, first:last]
        multiply(
            (last - first, inner, high - low), (address(a_part), inner, 1),
            (address(b[low // width :]), *b_strides), (address(c_part[0, :, low:]), units), False,
            backwards,
        )  # fmt: skip
        dots(
            (last - first, inner), (1, units, units), (low, high), (address(a_part), inner),
            (address(w), inner), (address(c_part[1]), units), False, backwards,
        )  # fmt: skip

    both(whole, 0, rows, 0, units)
    cuts = [0, 1, 3, 6, 10, 15, 21, 28, rows]
    for first, last in pairwise(cuts):
        for low in range(0, units, width):
            both(parts, first, last, low, low + width)
    np.testing.assert_array_equal(whole, parts)
    parts[:] = 0
    both(parts, 0, rows, 0, units, backwards=True)
    np.testing.assert_array_equal(whole, parts)
    assert whole.all()


def sigmoid(x):
    e = np.exp(-abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-abs(x)))


FUNCTIONS = {
    "erf": (np.vectorize(math.erf), TWO_ULP),
    "exp": (np.exp, TWO_ULP),
    "expm1": (np.expm1, TWO_ULP),
    "sigmoid": (sigmoid, MORE_ULP),
    "tanh": (np.tanh, MORE_ULP),
    "log": (np.log, TWO_ULP),
    "log1p": (np.log1p, TWO_ULP),
    "softplus": (softplus, TWO_ULP),
    "logsigmoid": (lambda x: -softplus(-x), TWO_ULP),
    "sin": (np.sin, TWO_ULP),
    "cos": (np.cos, TWO_ULP),
}


MOST = 1_000_003


def everywhere(dtype, count=MOST):
    """So many numbers among all bit patterns, as many in [-100, 100], and special ones."""
    whole = np.dtype(f"u{dtype().itemsize}")
    bits = np.arange(count, dtype=whole) * whole.type(np.iinfo(whole).max // count)
    info = np.finfo(dtype)
    special = [0, 1, 2 / 3, 4 / 3, 10, 88.72284, 89, 103.97, 104, 2**24, 2**30, 2.0**127, 2.8e38]
    special += [info.tiny, info.smallest_subnormal, info.max, info.eps, np.inf, np.nan]
    special = np.array([*special, *np.negative(special)], dtype)
    special = np.concatenate([special, *(np.nextafter(special, dtype(end)) for end in (-9, 9))])
    return np.concatenate(
        [bits.view(dtype), np.linspace(-100, 100, count - 20, dtype=dtype), special]
    )


@cache
def loop_of(function):
    """One for all tests: numba compiles it for a tenth of a second and more."""

    @njit
    def loop(x, y):
        for j in range(x.size):
            y[j] = function(x[j])

    return loop


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", thinned([200_003, MOST], 2))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise(name, dtype, count):
    function = getattr(elementwise, f"{name}_{dtype}")
    reference, ulps = FUNCTIONS[name]
    x = everywhere(getattr(np, dtype), count)
    found = np.empty_like(x)
    loop_of(function)(x, found)
    exact = reference(x.astype("float64" if dtype == "float32" else "longdouble"))
    rounded = exact.astype(dtype)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
    finite = np.isfinite(found) & np.isfinite(rounded) & np.isfinite(x)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    error = np.abs(found[finite] - exact[finite]) / np.spacing(np.abs(rounded[finite]))
    assert error.max() <= ulps, x[finite][error.argmax()]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_alone_or_in_a_loop(name):
    """A vector's lane gives the same bits as a single call."""
    function = getattr(elementwise, f"{name}_float32")
    x = everywhere(np.float32)[::4999].copy()
    found = np.empty_like(x)
    loop_of(function)(x, found)
    np.testing.assert_array_equal(found, np.array([function(each) for each in x], "float32"))


def test_tanh_and_sigmoid_are_within_1e_7():
    x = everywhere(np.float32)
    x, found = x[np.isfinite(x)], np.empty_like(x[np.isfinite(x)])
    for name in ("tanh", "sigmoid"):
        loop_of(getattr(elementwise, f"{name}_float32"))(x, found)
        assert np.abs(found - FUNCTIONS[name][0](x.astype("float64"))).max() <= 1e-7
    loop_of(elementwise.tanh_float32)(-x, negative := np.empty_like(x))
    loop_of(elementwise.tanh_float32)(x, found)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))
    np.testing.assert_array_equal(found, -negative)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("sin", "cos", "erf")])
def test_a_loop_is_made_of_vectors(name):
    loop = loop_of(getattr(elementwise, f"{name}_float32"))
    loop(np.ones(40, "float32"), np.ones(40, "float32"))
    (assembly,) = loop.inspect_asm().values()
    # LLVM prefers half vectors on some processors that have whole ones
    registers = {16: ("zmm", "ymm"), 8: ("ymm",), 4: ("xmm",)}[LANES["float32"]]
    packed = [
        line
        for line in assembly.splitlines()
        if "ps\t" in line and any(register in line for register in registers)
    ]
    assert len(packed) > 10
    assert not any(f"{name}f" in line for line in assembly.splitlines() if "call" in line)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_propagate_nan(dtype):
    nan, one, two, three = (np.dtype(dtype).type(value) for value in (np.nan, 1, 2, 3))
    largest, smallest, clamp = (
        getattr(elementwise, f"{name}_{dtype}") for name in ("maximum", "minimum", "clamp")
    )
    assert (largest(one, two), largest(two, one)) == (2, 2)
    assert (smallest(one, two), smallest(two, one)) == (1, 1)
    assert [clamp(x, two, three) for x in (one, two, three, two * 2)] == [2, 2, 3, 3]
    for function in (largest, smallest):
        assert np.isnan([function(nan, one), function(one, nan), function(nan, nan)]).all()
    assert np.isnan(clamp(nan, one, two))


def test_no_two_compiled_functions_have_one_name():
    """Binaries of two processes meet in a third, where names alone tell their functions apart."""
    found = {}
    for path in sorted(Path(product.__file__).parent.glob("*.py")):
        if path.stem in ("forward", "backward", "__init__"):  # their text stands in other modules
            continue
        for value in vars(importlib.import_module(f"openrnn.kernels.cpu.{path.stem}")).values():
            function = getattr(value, "py_func", None)
            if function is not None:
                name = f"{function.__module__}.{function.__qualname__}"
                assert found.setdefault(name, function) is function, name
    assert len(found) > 20
