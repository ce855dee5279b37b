"""The tables of `args` as compiled code reads them: `args.steps` is a load of that field.

An array field is the address of its first entry.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    register_model,
)

from openrnn.kernels.cpu.args import (
    Args,
    CollectArgs,
    DigestArgs,
    LoopArgs,
    PackArgs,
    RegionArgs,
    States,
    TaskArgs,
    TensorTasksArgs,
)

INT = ir.IntType(64)
BYTES = 8  # of a field


class ArgsPointer(types.Type):
    """The address of an object of a table."""

    def __init__(self, table: type[Args]) -> None:
        self.table = table
        super().__init__(name=table.__name__)


@register_model(ArgsPointer)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: ArgsPointer) -> None:
        super().__init__(manager, kind, INT.as_pointer())  # type: ignore[no-untyped-call]


@infer_getattr
class _Fields(AttributeTemplate):
    key = ArgsPointer

    def generic_resolve(self, kind: ArgsPointer, name: str) -> Any:  # type: ignore[override]
        field = kind.table.fields.get(name)
        if field is None:
            return None  # numba says that there is no such field
        return types.float64 if field.kind is float else types.int64


@lower_getattr_generic(ArgsPointer)  # type: ignore[untyped-decorator]
def _load(context: Any, builder: Any, kind: ArgsPointer, args: ir.Value, name: str) -> ir.Value:
    table = kind.table
    field = table.fields[name]
    if field.kind is States:
        states = builder.load(_at(builder, args, table.fields["states"].word), align=BYTES)
        index = builder.add(INT(table.arrays_at), builder.mul(INT(field.word), states))
        return builder.ptrtoint(builder.gep(args, [index], source_etype=INT), INT)
    pointer = _at(builder, args, field.word)
    if field.kind is float:
        pointer = builder.bitcast(pointer, ir.DoubleType().as_pointer())
    return builder.load(pointer, align=BYTES)


def _at(builder: Any, args: ir.Value, index: int) -> ir.Value:
    return builder.gep(args, [INT(index)], source_etype=INT)


def _reader_of(table: type[Args]) -> Any:
    """A function from an address to the table that lies there."""

    @intrinsic
    def at(_, address):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: Any, _: Any, args: list[ir.Value]) -> ir.Value:
            return builder.inttoptr(args[0], INT.as_pointer())

        return ArgsPointer(table)(types.int64), emit

    return at


loop_args_at, pack_args_at = _reader_of(LoopArgs), _reader_of(PackArgs)
digest_args_at = _reader_of(DigestArgs)
collect_args_at, region_args_at = _reader_of(CollectArgs), _reader_of(RegionArgs)
task_args_at, tensor_tasks_args_at = _reader_of(TaskArgs), _reader_of(TensorTasksArgs)
