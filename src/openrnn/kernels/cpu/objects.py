"""Source of kernels -> C functions: compiled in another process, kept on disk, loaded by LLVM.

Neither numba nor its memory is in this process, unless no other can be started.
"""

import ctypes
import json
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from openrnn import store
from openrnn.errors import ExportError, OpenRNNError
from openrnn.kernels.cpu import host

# The program of the compiling process. It compiles for this processor, looks for packages where
# this process does, and imports of ours only what the kernels need: no torch, and no __main__.
_BEGIN = """
import json, sys, types
request = json.loads(sys.stdin.buffer.read())
sys.path[:] = request["path"]
package = sys.modules["openrnn"] = types.ModuleType("openrnn")
package.__path__ = request["package"]
import llvmlite.binding as llvm
features = type(llvm.get_host_cpu_features())(request["features"])
llvm.get_host_cpu_features, llvm.get_host_cpu_name = (lambda: features), (lambda: request["cpu"])
from openrnn.kernels.cpu import compile
compile.serve(request)
"""


Address = int

# of all that was loaded: programs call functions at their addresses, so no code is ever freed
_engines: list[Any] = []


class LoadError(OpenRNNError, RuntimeError):
    """Object code that calls a function that this process does not have."""


class CompiledFunction:
    """A loaded function: its address, and a ctypes function, which releases the GIL."""

    __slots__ = ("address", "ctypes")

    def __init__(self, engine: Any, name: str, count: int) -> None:
        self.address: Address = engine.get_function_address(name)
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)
        self.ctypes = kind(self.address)


def kernels(source: str, names: Sequence[str], what: str = "a kernel") -> list[CompiledFunction]:
    """Functions that a module's source defines, ready to be called; `what` they are, in words."""
    return load(store.kept(path_of(source, names), lambda: _compile(source, names), what))


def path_of(source: str, names: Sequence[str]) -> Path:
    """Where the object code of these functions is kept."""
    return store.path_of("cpu", (*_made_of(), source, *names))


@lru_cache(maxsize=1)
def _made_of() -> tuple[str | bytes, ...]:
    """What every kernel depends on: our building blocks, the compilers, the processor."""
    texts = store.sources("openrnn.kernels.cpu", "rounds.py")
    versions = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    python = f"{sys.implementation.cache_tag} {sys.hexversion}"
    return (*texts, *versions, python, llvm.get_process_triple(), host.NAME, host.FEATURES)


def _compile(source: str, names: Sequence[str]) -> bytes:
    """The object code, from a process of its own where one can be started."""
    if (made := _in_a_process({"source": source, "names": list(names)})) is not None:
        return made
    from openrnn.kernels.cpu.compile import object_of

    here: bytes = object_of(source, names)
    return here


def bitcode(source: str, names: dict[str, str]) -> bytes:
    """Optimised bitcode of functions, by symbol, for `standalone`; kept like object code."""
    path = path_of(source, ["bitcode", *names, *names.values()])
    what = "a part of a library for programs without Python"
    return store.kept(path, lambda: _only_in_a_process({"part": (source, names)}), what)


def standalone(
    parts: Sequence[tuple[str, dict[str, str]]], modules: Sequence[bytes], data: dict[str, bytes],
    public: Sequence[str], machine: Sequence[str] | None = None,
) -> tuple[bytes, list[str]]:  # fmt: skip
    """Object code for a linker, and the functions that it calls: see `compile.standalone_of`."""
    asked = {
        "parts": parts, "public": list(public), "machine": machine,
        "modules": [b64encode(module).decode() for module in modules],
        "data": {symbol: b64encode(content).decode() for symbol, content in data.items()},
    }  # fmt: skip
    head, _, code = _only_in_a_process(asked).partition(b"\n")
    return code, json.loads(head)["calls"]


def _only_in_a_process(asked: dict[str, Any]) -> bytes:
    """As `_in_a_process`: numba here would link what is not whole, and LLVM end the process.

    Raises:
        ExportError: no such process, or it fails.
    """
    made = _in_a_process(asked)
    if made is None:
        raise ExportError("the Python process that compiles did not start, or it failed")
    return made


def _in_a_process(asked: dict[str, Any]) -> bytes | None:
    """The answer of a compiling process; None where none can be started, or it fails."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others
    request = {
        **asked, "path": path, "cpu": host.NAME,
        "features": {each[1:]: each[0] == "+" for each in host.FEATURES.split(",") if each},
        "package": list(_package()),
    }  # fmt: skip
    # in an application that embeds Python, sys.executable may be the application
    if re.match(r"python[\w.-]*$", Path(sys.executable or "").name):
        with suppress(OSError):
            done = subprocess.run(
                [sys.executable, "-I", "-c", _BEGIN],
                input=json.dumps(request).encode(), capture_output=True, check=False,
            )  # fmt: skip
            if done.returncode == 0 and done.stdout:
                return bytes(done.stdout)
    return None


def _package() -> Sequence[str]:
    """Where the modules of this package are."""
    return sys.modules["openrnn"].__path__


def load(code: bytes) -> list[CompiledFunction]:
    """The functions of an object.

    Raises:
        LoadError: a function that it calls is not there.
    """
    head, _, body = code.partition(b"\n")
    about = json.loads(head)
    _prepare()
    machine = llvm.Target.from_triple(about["triple"]).create_target_machine(
        cpu=host.NAME, features=host.FEATURES, opt=3, codemodel="jitdefault", jit=True
    )
    module = llvm.parse_assembly("")
    module.triple = about["triple"]
    engine = llvm.create_mcjit_compiler(module, machine)
    # LLVM aborts the process if a symbol is missing
    missing = [name for name in about["calls"] if llvm.address_of_symbol(name) is None]
    if missing:
        from numba.core.registry import cpu_target

        cpu_target.target_context.refresh()  # numba has some functions of its own
        missing = [name for name in missing if llvm.address_of_symbol(name) is None]
    if missing:
        raise LoadError(f"a compiled kernel calls {', '.join(missing)}, unknown to this process")
    engine.add_object_file(llvm.ObjectFileRef.from_data(body))
    engine.finalize_object()
    _engines.append(engine)
    return [CompiledFunction(engine, name, count) for name, count in about["takes"].items()]


@lru_cache(maxsize=1)
def _prepare() -> None:
    with suppress(RuntimeError):  # newer versions do this themselves
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
