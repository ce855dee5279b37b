"""Compiles numba source to object code, which needs no numba to run.

In a process of its own, `serve` answers one request. The process then ends, so that the compiler's
memory, a hundred megabytes a kernel, goes back to the system.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import compiler, config, cpu
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from openrnn.kernels.cpu import host

INT = ir.IntType(64)


@global_compiler_lock  # type: ignore[untyped-decorator]
def object_of(source: str, names: Sequence[str]) -> bytes:
    """The object code of functions that a module's source defines, as C functions of these names.

    Their arguments are int64, and they return nothing. Exceptions that they raise are lost.
    """
    found: dict[str, Any] = {"__name__": "openrnn.generated"}
    exec(compile(source, "<openrnn.generated>", "exec"), found)  # our own text
    library = cpu_target.target_context.codegen().create_library("openrnn")
    module = library.create_ir_module("openrnn")
    takes = {name: _export(found[name], name, library, module) for name in names}
    library.add_ir_module(module)
    library.finalize()
    whole = llvm.parse_assembly(library.get_llvm_str())
    machine = llvm.Target.from_triple(whole.triple).create_target_machine(
        cpu=host.NAME, features=host.FEATURES, opt=3, reloc="default", codemodel="jitdefault",
        jit=True,
    )  # fmt: skip
    declared = [function.name for function in whole.functions if function.is_declaration]
    called = [name for name in declared if not name.startswith("llvm.")]
    head = json.dumps({"triple": whole.triple, "calls": called, "takes": takes})
    code: bytes = machine.emit_object(whole)
    return head.encode() + b"\n" + code


def _export(function: Any, name: str, library: Any, module: ir.Module) -> int:
    """Adds a C function that calls the compiled function; returns the number of its arguments."""
    context = cpu_target.target_context
    # the options of its decorator, if it has one; functions that it calls inherit them
    options = {"nopython": True, "error_model": "numpy", **getattr(function, "targetoptions", {})}
    function = getattr(function, "py_func", function)
    flags: Any = compiler.Flags()
    cpu_target.options.parse_as_flags(flags, options)
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    takes = (types.int64,) * function.__code__.co_argcount
    made = compiler.compile_extra(
        cpu_target.typing_context, context, function, takes, types.void, flags, {}
    )
    inner = context.declare_function(module, made.fndesc)
    outer = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT] * len(takes)), name)
    builder = ir.IRBuilder(outer.append_basic_block())
    context.call_conv.call_function(builder, inner, types.void, takes, outer.args)
    builder.ret_void()
    library.add_linking_library(made.library)
    return len(takes)


def serve(request: dict[str, Any]) -> None:
    """Compiles one request and writes the object code to where standard output was."""
    out = os.dup(1)
    os.dup2(2, 1)  # anything else that is printed goes to standard error
    config.DISABLE_JIT = 0  # type: ignore[attr-defined]  # whatever the user's settings of numba are
    # functions that are only linked into others need no code of their own; numba asks for an
    # executable of each, a builtin function that must be another one each time
    cpu.CPUContext.get_executable = lambda *_: [].append  # type: ignore[method-assign]
    code = object_of(request["source"], request["names"])
    with os.fdopen(out, "wb") as pipe:
        pipe.write(code)
