"""`openrnn info`, `openrnn explain` and `openrnn convert`: no training, no timing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from openrnn_command.options import CELLS, Backend, interruptible, option

LIBRARIES = (
    "openrnn, torch, keras, cudnn, mxnet_fused, jax, tf_canonical, tf_cell, flax, nnx_plain, nnx, "
    "equinox, onnx, gluon, mxnet, haste, xlstm, xlstm_cuda or flashrnn"
)


@interruptible
def info() -> int:
    """Print versions, devices, and each backend or the reason why it is absent."""
    from openrnn.info import report

    rows = list(report())
    width = max(len(what) for what, _ in rows)
    for what, text in rows:
        typer.echo(f"{what:<{width}}  {text}")
    return 0


@interruptible
def explain(
    *,
    cell: Annotated[str, typer.Option(help=CELLS)] = "lstm",
    input: Annotated[int, typer.Option(help="Features of an input step, I")] = 128,
    hidden: Annotated[int, typer.Option(help="Units of each layer, H")] = 128,
    layers: Annotated[int, typer.Option(help="Number of layers, L")] = 1,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Layers run in both directions")
    ] = False,
    proj: Annotated[
        int, typer.Option(help="Width of an LSTM's projection, P; 0 for no projection")
    ] = 0,
    dropout: Annotated[float, typer.Option(help="Probability of dropout between the layers")] = 0.0,
    bias_mode: Annotated[
        str, typer.Option(help="Which biases there are: double, input, recurrent or none")
    ] = "double",
    clip: Annotated[
        float | None, option("Largest absolute value of the cell state; no bound if not given")
    ] = None,
    wavefront: Annotated[
        int | None,
        option(
            "Layers at the same time, each so many steps behind the one below; 0: one after the "
            "other; 1: all in one launch",
            "what a model of the time says",
        ),
    ] = None,
    steps: Annotated[int | None, option("Number of steps of the call, T")] = None,
    batch: Annotated[int | None, option("Batch size of the call, B")] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; the device need not be in this machine")
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64")] = "float32",
    capability: Annotated[
        str | None,
        option("Compute capability to suppose, such as 9.0", "that of the CUDA device here"),
    ] = None,
    training: Annotated[
        bool,
        typer.Option("--training/--inference", help="With gradients and dropout, or without"),
    ] = True,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="The call gives a length for each sequence")
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="The call resets states inside sequences")
    ] = False,
    backend: Backend = "auto",
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule",
            help="Also list the operations of the call in order; needs --steps and --batch",
        ),
    ] = False,
) -> int:
    """Show which backend would run a call, and why each other one would not. Runs nothing.

    Exit code 1 means that no backend takes the call, here or on another machine.
    """
    import torch

    from openrnn import cells, problem_key
    from openrnn.explain import explain as explain_problem
    from openrnn.lm.config import refusing
    from openrnn.lm.model import find
    from openrnn.problem_key import ProblemKey
    from openrnn.spec import clip_bounds, precision_of

    with refusing():
        spec = find(cell).spec(
            input, hidden, num_layers=layers, bidirectional=bidirectional, proj_size=proj,
            dropout=dropout, bias_mode=bias_mode, cell_clip=clip_bounds(clip),
            wavefront=wavefront,
        )  # fmt: skip
        cells.check(spec)
        for count, what in ((steps, "steps"), (batch, "batch")):
            if count is not None and count < 0:
                raise ValueError(f"--{what} must be 0 or more, got {count}")
        if schedule and (steps is None or batch is None):
            raise ValueError("--schedule needs --steps and --batch")
        if capability is not None and device == "cpu":
            raise ValueError("--capability is of a GPU: it needs --device cuda")
        where = _choice("device", device, ("cpu", "cuda"))
        name = _choice("dtype", dtype, ("float32", "float16", "bfloat16", "float64"))
        kind: torch.dtype = getattr(torch, name)
        asked = ProblemKey(
            spec.text, kind, torch.device(where), precision_of(spec, kind, where), grad=training,
            training=training, lengths=lengths, reset=reset, batch=batch, steps=steps,
            capability=_capability(capability),
        )  # fmt: skip
        table = explain_problem(problem_key.problem_of(asked), backend=backend, schedule=schedule)
    if not (table.elsewhere or table.chosen):
        typer.echo("no backend takes this")
    return 0 if table.elsewhere or table.chosen else 1


@interruptible
def convert(
    given: Annotated[Path, typer.Argument(help="File to read", metavar="IN")],
    out: Annotated[Path, typer.Argument(help="File to write", metavar="OUT")],
    *,
    source: Annotated[
        str, typer.Option("--from", help=f"Library whose weights IN holds: {LIBRARIES}")
    ],
    target: Annotated[
        str, typer.Option("--to", help="Library whose weights to write; the same names")
    ],
    cell: Annotated[
        str | None, option("The cell, a name of openrnn.cells, where the arrays fit several")
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Read only the arrays, or nodes, whose names begin so")
    ] = "",
    bidirectional: Annotated[
        bool | None,
        option("Whether there are two directions, where neither names nor shapes say it"),
    ] = None,
    hidden: Annotated[int | None, option("Units of a layer, where IN is one flat buffer")] = None,
    layers: Annotated[int, typer.Option(help="Layers, where IN is one flat buffer")] = 1,
    proj: Annotated[
        int, typer.Option(help="Width of the projection, where IN is one flat buffer; 0 for none")
    ] = 0,
    sum_biases: Annotated[
        bool,
        typer.Option("--sum-biases", help="Add two biases up where the target has only one"),
    ] = False,
    heads: Annotated[int, typer.Option(help="Heads to write, for xlstm and flashrnn")] = 1,
) -> int:
    """Turn a file of one library's weights into a file of another library's.

    The ending of a file's name says what it is. IN may be .safetensors, .npz, .pt, .h5, .keras or
    .onnx, and OUT one of the first three.
    """
    from openrnn.convert import command
    from openrnn.lm.config import refusing
    from openrnn.onnx import stack

    asked = command.Options(
        source, target, cell, prefix, bidirectional, hidden, layers, proj, sum_biases, heads
    )
    readers = {**command.ARRAYS, ".onnx": stack.read_layer}
    with refusing():
        typer.echo(command.execute(given, out, asked, readers))
    return 0


def _choice(name: str, value: str, valid: Sequence[str]) -> str:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
    return value


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, dot, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and dot):
        raise ValueError(f"capability must look like 9.0, got {text!r}")
    return int(major), int(minor)
