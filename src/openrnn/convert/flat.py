"""Networks in one flat buffer, whose length is all that says their sizes."""

from dataclasses import dataclass

from torch import Tensor

from openrnn import cells, params
from openrnn.convert.advice import AdviceError, Argument
from openrnn.convert.layouts import Library
from openrnn.convert.libraries import layouts
from openrnn.spec import Spec

NAME = "params"


@dataclass(frozen=True)
class FlatSizes:
    """What the length of a flat buffer does not say."""

    hidden_size: int | None = None
    num_layers: int = 1
    bidirectional: bool = False
    proj_size: int = 0


def spec_of(library: Library, buffer: Tensor, cell: str | None, sizes: FlatSizes) -> Spec:
    """The network with these units and layers whose buffer has this length.

    Raises:
        ValueError: none has, or it is not said how many units it has.
    """
    fits = layouts(library, cell)
    hidden_size = sizes.hidden_size
    if hidden_size is None or len(fits) > 1:
        raise AdviceError(
            f"the length of a flat buffer of {library.name} does not say its sizes: needs ",
            Argument("cell="), ", ", Argument("hidden_size="), " and, where not 1, ",
            Argument("num_layers="), " and ", Argument("bidirectional="),
        )  # fmt: skip
    if not buffer.is_floating_point():
        raise ValueError(f"{NAME} must be real numbers, got {buffer.dtype}")
    known = cells.lookup(fits[0].cell)
    options = {
        "num_layers": sizes.num_layers, "bidirectional": sizes.bidirectional,
        "proj_size": sizes.proj_size,
    }  # fmt: skip
    least = known.spec(1, hidden_size, **options)
    cells.check(least)
    rest = params.size(least) - least.directions * len(known.gates) * hidden_size
    inputs, over = divmod(buffer.numel() - rest, params.size(least) - rest)
    if buffer.dim() != 1 or inputs < 1 or over:
        raise ValueError(
            f"{NAME} must be a vector of {rest} + {params.size(least) - rest} * I numbers, got "
            f"shape {tuple(buffer.shape)}"
        )
    return known.spec(inputs, hidden_size, **options)
