"""What the forward and the backward loop share: rows in memory, times, resets, dropout."""

from numba import njit

from openrnn.kernels.cpu.host import SIZES
from openrnn.kernels.cpu.layout import rounded_rows as _rounded_rows
from openrnn.kernels.cpu.layout import strip_offset as _strip_offset
from openrnn.kernels.cpu.layout import whole_pairs as _whole_pairs
from openrnn.kernels.cpu.memory import bytes_at, float32_at, float64_at, int64_at, named
from openrnn.kernels.cpu.vectors import compiled
from openrnn.rounds import MULTIPLIERS, ROUNDS, WEYL, WORD

_M0, _M1 = MULTIPLIERS
_W0, _W1 = WEYL
_WORD, _ROUNDS = WORD, ROUNDS

pair_words = compiled(_whole_pairs)
rounded_rows = compiled(_rounded_rows)
strip_offset = compiled(_strip_offset)


@njit(nogil=True, error_model="numpy")
def row_of(args, position):
    """The batch row at a position of the sorted order."""
    return int64_at(args.order)[position] if args.order != 0 else position


@njit(nogil=True, error_model="numpy")
def length_of(args, position):
    """The steps of the sequence at a position."""
    if args.lengths == 0:
        return args.steps
    return int64_at(args.lengths)[row_of(args, position)]


@njit(nogil=True, error_model="numpy")
def time_of(args, step, length):
    """The time that a sequence reaches at a step of the recurrence."""
    return length - 1 - step if args.reverse != 0 else step


@njit(nogil=True, error_model="numpy")
def slot_of(args, step):
    """The place of a step's gate rows: its time where all rows share that, else the step."""
    if args.reverse != 0 and args.lengths == 0:
        return args.steps - 1 - step
    return step


@njit(nogil=True, error_model="numpy")
def is_reset(args, step, time, row):
    """Whether a reset replaces the states before this step.

    In the reverse direction a reset at time t acts after the step at time t.
    """
    if args.reset == 0:
        return False
    if args.reverse != 0:
        if step == 0:
            return False
        time += 1
    return bytes_at(args.reset)[time * args.batch + row] != 0


@njit(nogil=True, error_model="numpy")
def ends_reset(args, row):
    """Whether a reset replaces the final state: in reverse, the one at time 0."""
    return args.reset != 0 and args.reverse != 0 and bytes_at(args.reset)[row] != 0


@njit(nogil=True, error_model="numpy")
def _words(low, high, unit, b, t, word):
    c0, c1, c2, c3 = unit, b & _WORD, t & _WORD, word
    for _ in range(_ROUNDS):
        # 32 x 32 bits in 64 without a sign: the halves are multiplied apart
        low0, low1 = _M0 * (c0 & 0xFFFF), _M1 * (c2 & 0xFFFF)
        high0, high1 = _M0 * (c0 >> 16) + (low0 >> 16), _M1 * (c2 >> 16) + (low1 >> 16)
        c0, c1, c2, c3 = (
            ((high1 >> 16) & _WORD) ^ c1 ^ low,
            ((high1 & 0xFFFF) << 16) | (low1 & 0xFFFF),
            ((high0 >> 16) & _WORD) ^ c3 ^ high,
            ((high0 & 0xFFFF) << 16) | (low0 & 0xFFFF),
        )
        low, high = (low + _W0) & _WORD, (high + _W1) & _WORD
    return c0, c1, c2, c3


def _for(reals, dtype):
    size = SIZES[dtype]

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def copy(target, source, count, padded):
        """target[0:count] = source, or 0 where source is no address; the rest up to padded is 0."""
        out = reals(target)
        if source == 0:
            for j in range(padded):
                out[j] = 0
            return
        given = reals(source)
        for j in range(count):
            out[j] = given[j]
        for j in range(count, padded):
            out[j] = 0

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def add(target, source, count):
        """target[0:count] += source."""
        out, given = reals(target), reals(source)
        for j in range(count):
            out[j] += given[j]

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def drop(target, source, count, t, b, args, accumulate):
        """target (+)= source times the dropout mask of philox.py, for row (t, b)."""
        out, given = reals(target), reals(source)
        low, high, word = args.drop_low, args.drop_high, args.drop_word
        threshold, scale = args.drop_threshold, args.drop_scale
        for group in range((count + 3) // 4):
            words = _words(low, high, group, b, t, word)
            for k in range(min(4, count - 4 * group)):
                j = 4 * group + k
                value = given[j] * scale if words[k] >= threshold else given[j] * 0
                out[j] = out[j] + value if accumulate else value

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def spread(target, bias, gates, units, padded):
        """Adds a bias vector [gates, units], where there is one, to a gate row [gates, padded]."""
        if bias != 0:
            for g in range(gates):
                add(target + g * padded * size, bias + g * units * size, units)

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def gather(args, target, gate):
        """Writes, or adds, a gate row to a row of the gradient of an x that has no matrix."""
        units, padded = args.units, args.padded
        for g in range(args.gates):
            to, source = target + g * args.x_gate * size, gate + g * padded * size
            if args.dx_add != 0 or (g > 0 and args.x_gate == 0):
                add(to, source, units)
            else:
                copy(to, source, units, units)

    return copy, add, drop, spread, gather


copy_float32, add_float32, drop_float32, spread_float32, gather_float32 = _for(
    float32_at, "float32"
)
copy_float64, add_float64, drop_float64, spread_float64, gather_float64 = _for(
    float64_at, "float64"
)
