"""Names that an exported layer may have in C and C++."""

import re

# of C23 and C++23; what a header cannot use as a member's name
KEYWORDS = frozenset(
    """alignas alignof and and_eq asm atomic auto bitand bitor bool break case catch char class
    compl complex concept const const_cast consteval constexpr constinit continue co_await co_return
    co_yield decltype default delete do double dynamic_cast else enum explicit export extern false
    float for friend goto if imaginary inline int linux long mutable namespace new noexcept not
    not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires
    restrict return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename typeof union unix unsigned using virtual
    void volatile wchar_t while xor xor_eq work""".split()
)
# NAME for which NAME_t is a type of the C or POSIX library
TYPES = frozenset(
    """blkcnt blksize char16 char32 char8 clock clockid dev div double errno fenv fexcept float fpos
    fsblkcnt fsfilcnt gid id imaxdiv ino int16 int32 int64 int8 intmax intptr jmp_buf key ldiv lldiv
    locale max_align mbstate mode mtx nlink nullptr off once_flag pid ptrdiff regex rsize sig_atomic
    sigset size ssize suseconds thrd time timer tss uid uint16 uint32 uint64 uint8 uintmax uintptr
    va_list wchar wctrans wctype wint""".split()
)


def check(name: str) -> None:
    """Raises ValueError for the name of a layer that makes no type NAME_t of its own."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"the name of the files must be a C identifier such as amp, got {name!r}")
    if name in TYPES:
        raise ValueError(
            f"the name of the files must be another: {name}_t is a type of C's library"
        )


def member(state: str) -> str:
    """The member of a state: its name, with an underscore where that is no name in C or C++."""
    return f"{state}_" if state in KEYWORDS else state
