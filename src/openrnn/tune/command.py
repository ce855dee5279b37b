"""`openrnn tune` from the words of its options to what is printed."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from openrnn.bench import command as benchmark
from openrnn.bench import machine, report
from openrnn.bench.options import Options, device_of
from openrnn.bench.record import Writer, files_of, read
from openrnn.codegen.config import SIZES
from openrnn.errors import OpenRNNError
from openrnn.lm.config import refusing
from openrnn.tune import regions as regions_
from openrnn.tune import table as table_
from openrnn.tune.candidates import KINDS
from openrnn.tune.kernels import TuneRequest, measure
from openrnn.tuning import measured

CELLS, EVERY_KIND = ",".join(TuneRequest.cells), ",".join(KINDS)
HIDDEN, BATCHES = ",".join(map(str, TuneRequest.hidden)), ",".join(map(str, TuneRequest.batches))


def kernels(
    cell: str = CELLS,
    dtype: str = "bfloat16",
    kind: str = EVERY_KIND,
    mask: str = measured.PLAIN,
    hidden: str = HIDDEN,
    batch: str = BATCHES,
    most: int = TuneRequest.most,
    delays: bool = False,
    loops: int = 1,
    json: Path | None = None,
    table: Path | None = None,
) -> int:
    """Times CUDA kernels alone and prints the fastest; words of options stand between commas."""
    with refusing():
        device_of("cuda")
    request = TuneRequest(
        _of("cell", cell), _of("dtype", dtype, tuple(SIZES)), _of("kind", kind, KINDS),
        _of("mask", mask, measured.MASKS), _numbers("hidden", hidden), _numbers("batch", batch),
        most, delays, _numbers("loops", str(loops), measured.LOOPS)[0],
    )  # fmt: skip
    torch.zeros(1, device="cuda")
    times = measure(request, Writer(json, machine.describe("cuda")), Console(stderr=True))
    report.console().print(report.rendered(table_.sheet(times)))
    if table is not None:
        table.write_text(table_.text_of([times]), encoding="utf-8")
    return 0


def table(files: Sequence[Path]) -> int:
    """Prints the table of fastest kernels with the times of some files; later ones win."""
    found = [read(path).kernels for path in files_of(files)]
    print(table_.text_of(found), end="")
    return 0


def regions(
    json: Path | None = None,
    resume: bool = False,
    minutes: float | None = None,
    workers: int = 0,
    show: Sequence[Path] = (),
) -> int:
    """Prints the regions in which cuDNN is faster: of a measurement, or of files of results.

    Raises:
        OpenRNNError: there is neither a file to write nor one to read.
    """
    code = 0
    if not show:
        if json is None:
            raise OpenRNNError("tune regions needs a file to write, --json, or results, --show")
        options = Options(
            suite="fused", device="cuda", against=regions_.PEERS[::-1], json=json, resume=resume,
            minutes=minutes, workers=workers,
        )  # fmt: skip
        with refusing():
            code = benchmark.execute(options)
    results = [one for path in files_of(show or [json or Path()]) for one in read(path).results]
    for region in regions_.regions_of(results):
        print(region)
    return code


def _of(name: str, text: str, valid: tuple[str, ...] | None = None) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if valid is not None and word not in valid:
            raise OpenRNNError(f"{name} must be of {', '.join(valid)}, got {word!r}")
    return words


def _numbers(name: str, text: str, valid: tuple[int, ...] | None = None) -> list[int]:
    words = _of(name, text, None if valid is None else tuple(map(str, valid)))
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise OpenRNNError(f"{name} must be sizes, as 64,256, got {text!r}")
    return [int(word) for word in words]
