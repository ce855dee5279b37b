"""A layer's object code and header, for the processor that this process compiles for."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.base import traced
from openrnn.backends.cpu.baked import baked
from openrnn.cells import Cell
from openrnn.embed.header import header
from openrnn.embed.source import DATA, LOOP, ROW, functions
from openrnn.embed.undefined import undefined
from openrnn.errors import ExportError
from openrnn.spec import Problem, Spec, dtype_name

REAL = {torch.float32: "float", torch.float64: "double"}
# what the code may call of the C library: sched_yield is named and never called, and functions of
# <math.h> serve float64 and operators of a user's cell that have no polynomial of ours
MEMORY = frozenset({"memcpy", "memmove", "memset", "sched_yield"})
_MATH = """acos acosh asin asinh atan atan2 atanh ceil cos cosh erf erfc exp exp2 expm1 floor fma
    fmod hypot log log10 log1p log2 nearbyint pow remainder rint round sin sinh sqrt tan tanh
    trunc"""
MATH = frozenset(name + suffix for name in _MATH.split() for suffix in ("", "f"))


class Machine(NamedTuple):
    """A processor of another architecture, in LLVM's words."""

    triple: str
    cpu: str
    features: str


class Job(NamedTuple):
    """What is exported.

    Attributes:
        cell: comes first, so that another process knows it when it reads the spec.
        name: what all names begin with; title: what the layer is.
        weights: in the order of `module_slots`, on the CPU.
        block: steps whose inputs are multiplied at a time.
        machine: of another architecture; None for this process's own processor.
    """

    cell: Cell
    spec: Spec
    name: str
    title: str
    weights: list[Tensor]
    block: int
    machine: Machine | None = None


class Compiled(NamedTuple):
    """The text of the header, and the object code."""

    header: str
    code: bytes


def compiled(job: Job) -> Compiled:
    """Compiles it.

    Raises:
        ExportError: the code calls what a C program may not have.
    """
    from openrnn.codegen import numba
    from openrnn.kernels.cpu import host, loops, objects

    spec, dtype = job.spec, job.weights[0].dtype
    problem = Problem(spec.with_(precision="default"), dtype, "cpu")
    kind = dtype_name(dtype)
    with torch.no_grad():
        found = functions(baked(problem, job.block, job.weights), job.block)
    public = {"reset": f"{job.name}_reset", "step": f"{job.name}_step"}
    code, declared = objects.standalone(
        [(numba.source(traced(spec), kind), {"step_rows": ROW}), (found.text, public)],
        [objects.bitcode(loops.source("forward", kind), {"forward": LOOP})],
        {DATA: found.data}, [*public.values()], job.machine,
    )  # fmt: skip
    names = undefined(code)
    calls = set(declared if names is None else names)
    if unknown := ", ".join(sorted(calls - MEMORY - MATH)):
        raise ExportError(
            f"the compiled layer calls {unknown}, of neither <math.h> nor the memory functions of C"
        )
    text = header(
        job.name, job.title, spec, REAL[dtype], found.work,
        job.machine.triple if job.machine else host.NAME,
        sorted(calls - {"sched_yield"}),
    )  # fmt: skip
    return Compiled(text, code)
