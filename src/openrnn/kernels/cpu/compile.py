"""Compiles numba source to object code, which needs no numba to run.

In a process of its own, `serve` answers one request. The process then ends, so that the compiler's
memory, a hundred megabytes a kernel, goes back to the system.
"""

import gc
import json
import os
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import compiler, config, cpu
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

from openrnn.kernels.cpu import host

INT = ir.IntType(64)
Part = tuple[str, Mapping[str, str]]  # a module's source; of its functions, name to symbol
Library: Any = CPUCodeLibrary  # of numba: a function's module, and those that it is linked with


class Whole(Library):  # type: ignore[misc]
    """All functions of an object, linked once and then optimised together.

    numba would do so for every function with all that it calls, and compile each, too.
    """

    def finalize(self) -> None:
        for part in _all_linked(self, set()):
            self._final_module.link_in(part._get_module_for_linking(), preserve=True)
        self._optimize_final_module()
        self._final_module.verify()
        self._finalized = True


def _all_linked(library: Any, seen: set[int]) -> Iterator[Any]:
    """The libraries of what a library calls, each once; callers first: LLVM leaves out the rest."""
    for part in library._linking_libraries:
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            yield from _all_linked(part, seen)


@global_compiler_lock  # type: ignore[untyped-decorator]
def object_of(source: str, names: Sequence[str]) -> bytes:
    """The object code of functions that a module's source defines, as C functions of these names.

    Their arguments are int64. They return nothing, or int64 where they are annotated with int.
    Exceptions that they raise are lost.
    """
    whole, takes = _linked([(source, {name: name for name in names})])
    machine = _machine(whole.triple, reloc="default", codemodel="jitdefault", jit=True)
    head = json.dumps({"triple": whole.triple, "calls": _calls(whole), "takes": takes})
    code: bytes = machine.emit_object(whole)
    return head.encode() + b"\n" + code


@global_compiler_lock  # type: ignore[untyped-decorator]
def bitcode_of(part: Part) -> bytes:
    """A part of `standalone_of` that many objects have, optimised."""
    code: bytes = _linked([part])[0].as_bitcode()
    return code


@global_compiler_lock  # type: ignore[untyped-decorator]
def standalone_of(
    parts: Sequence[Part], modules: Sequence[bytes], data: Mapping[str, bytes],
    public: Sequence[str], machine: Sequence[str] | None = None,
) -> bytes:  # fmt: skip
    """Object code that a linker takes, with data, for programs without Python.

    Args:
        parts: sources, and the symbol of each function that others call.
        modules: bitcode of others.
        data: constants by symbol, at multiples of 64 bytes.
        public: the symbols of functions that programs see; all others are hidden.
        machine: triple, processor and features of another architecture; None for this process's.
    """
    whole, _ = _linked(parts, data)
    for module in modules:
        whole.link_in(llvm.parse_bitcode(module))
    for each in (*whole.functions, *whole.global_variables):
        if not each.is_declaration and each.name not in public:
            each.linkage = "internal"
    if machine is None:
        target = _machine(whole.triple, reloc="pic", codemodel="default", jit=False)
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        whole.triple, cpu, features = machine
        target = llvm.Target.from_triple(whole.triple).create_target_machine(
            cpu=cpu, features=features, opt=3, reloc="pic", codemodel="default"
        )
        whole.data_layout = str(target.target_data)
    head = json.dumps({"triple": whole.triple, "calls": _calls(whole)})
    code: bytes = target.emit_object(whole)
    return head.encode() + b"\n" + code


def _linked(
    parts: Sequence[Part], data: Mapping[str, bytes] | None = None
) -> tuple[Any, dict[str, int]]:
    """One optimised module of all functions and data; how many arguments each function takes."""
    library = Whole(cpu_target.target_context.codegen(), "openrnn")
    module = library.create_ir_module("openrnn")
    takes, again = dict[str, int](), False
    for source, names in parts:
        found: dict[str, Any] = {"__name__": "openrnn.generated"}
        exec(compile(source, "<openrnn.generated>", "exec"), found)  # our own text
        for name, symbol in names.items():
            takes[symbol] = _export(found[name], symbol, library, module)
            again = again or "fastmath" in getattr(found[name], "targetoptions", {})
    for symbol, content in (data or {}).items():
        kind = ir.ArrayType(ir.IntType(8), len(content))
        constant = ir.GlobalVariable(module, kind, symbol)
        constant.initializer, constant.global_constant = ir.Constant(kind, bytearray(content)), True
        constant.align = 64
    library.add_ir_module(module)
    library.finalize()
    if again:
        # which products are fused with a sum follows from the order of operands, settled only now
        library._optimize_final_module()
    return llvm.parse_assembly(library.get_llvm_str()), takes


def _machine(triple: str, **options: Any) -> Any:
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=host.NAME, features=host.FEATURES, opt=3, **options)


def _calls(module: Any) -> list[str]:
    """The functions that a module calls and does not have."""
    declared = [function.name for function in module.functions if function.is_declaration]
    return [name for name in declared if not name.startswith("llvm.")]


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
    returns = function.__annotations__.get("return") is int
    kind: Any = types.int64 if returns else types.void
    made = compiler.compile_extra(
        cpu_target.typing_context, context, function, takes, kind, flags, {}
    )
    inner = context.declare_function(module, made.fndesc)
    result = INT if returns else ir.VoidType()
    outer = ir.Function(module, ir.FunctionType(result, [INT] * len(takes)), name)
    builder = ir.IRBuilder(outer.append_basic_block())
    _, value = context.call_conv.call_function(builder, inner, kind, takes, outer.args)
    builder.ret(value) if returns else builder.ret_void()
    library.add_linking_library(made.library)
    return len(takes)


def serve(request: dict[str, Any]) -> None:
    """Compiles one request and writes the object code to where standard output was."""
    out = os.dup(1)
    os.dup2(2, 1)  # anything else that is printed goes to standard error
    gc.disable()  # the process ends before it pays
    config.DISABLE_JIT = 0  # type: ignore[attr-defined]  # whatever the user's settings of numba are
    _do_less()
    if "part" in request:
        code = bitcode_of(request["part"])
    elif "parts" in request:
        data = {symbol: b64decode(text) for symbol, text in request["data"].items()}
        modules = [b64decode(text) for text in request["modules"]]
        code = standalone_of(request["parts"], modules, data, request["public"], request["machine"])
    else:
        code = object_of(request["source"], request["names"])
    with os.fdopen(out, "wb") as pipe:
        pipe.write(code)


def _do_less() -> None:
    """Takes from numba what only functions called from Python need: three quarters of the time."""
    context: Any = cpu.CPUContext
    functions: Any = Dispatcher
    # numba asks for an executable of each function, a builtin function, each time another one
    context.get_executable = lambda *_: [].append
    context.create_cpython_wrapper = context.create_cfunc_wrapper = lambda *_, **__: None

    def finalize(library: Any) -> None:
        library._finalized = True  # `Whole` links and optimises it

    Library.finalize = finalize
    template = functions.get_call_template

    def get_call_template(self: Any, args: Sequence[Any], kws: dict[str, Any]) -> Any:
        # else numba compiles a function anew for each number in the source; not so truth values and
        # strides in tuples, as products that read them at run time are slower
        plain = (arg.literal_type if isinstance(arg, types.IntegerLiteral) else arg for arg in args)
        return template(self, tuple(plain), kws)

    functions.get_call_template = get_call_template
