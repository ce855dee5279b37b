"""Functions and data of an object by their symbols: compiled code asks for their addresses."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

INT = ir.IntType(64)


def function_at(name: str, arguments: int) -> Any:
    """A function for compiled code: the address of a C function of so many int64."""
    return _address(lambda module: ir.Function(module, _kind(arguments), name), name)


def data_at(name: str) -> Any:
    """A function for compiled code: the address of data."""
    return _address(lambda module: ir.GlobalVariable(module, ir.IntType(8), name), name)


def _kind(arguments: int) -> ir.FunctionType:
    return ir.FunctionType(ir.VoidType(), [INT] * arguments)


def _address(declare: Any, name: str) -> Any:
    @intrinsic
    def address(_: Any) -> Any:
        def emit(_: Any, builder: Any, __: Any, ___: Any) -> Any:
            found = builder.module.globals.get(name) or declare(builder.module)
            return builder.ptrtoint(found, INT)

        return types.int64(), emit

    return address
