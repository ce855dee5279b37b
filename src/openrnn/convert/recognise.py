"""What the arrays of a library are: which cell, how many layers and directions, which sizes."""

from dataclasses import dataclass

import torch

from openrnn import cells
from openrnn.convert import gather
from openrnn.convert.advice import AdviceError, Argument, parts_of
from openrnn.convert.arrays import Arrays
from openrnn.convert.biases import mode_of
from openrnn.convert.gather import Chain, NamesError
from openrnn.convert.layouts import Layout, Library
from openrnn.convert.libraries import layouts
from openrnn.convert.rewrite import Blocks, Sizes, check, measure, read
from openrnn.spec import Spec


class _UndecidedError(AdviceError):
    """Arrays are layers or directions of a cell, and nothing says which."""


@dataclass(frozen=True)
class Network:
    """What arrays turned out to be: a spec, and the blocks of each layer and direction."""

    spec: Spec
    dtype: torch.dtype
    chains: list[Blocks]


def recognise(
    library: Library,
    arrays: Arrays,
    cell: str | None,
    bidirectional: bool | None,
    in_order: bool = True,
) -> Network:
    """The one network that the arrays fit; `in_order` where layers stand as they follow.

    Raises:
        ValueError: they fit none, or several.
    """
    found: list[Network] = []
    refusals: dict[str, ValueError] = {}
    for layout in layouts(library, cell):
        try:
            for chains, directions in gather.candidates(library, layout, arrays, in_order):
                try:
                    found.append(_network(library, layout, chains, directions, bidirectional))
                except ValueError as error:
                    refusals.setdefault(layout.cell, error)
        except NamesError as error:
            refusals.setdefault(layout.cell, error)
    undecided = [key for key, error in refusals.items() if isinstance(error, _UndecidedError)]
    if len(found) == 1 and not undecided:
        return found[0]
    if found:
        fits = [network.spec.cell for network in found]
        if len(set(fits)) < len(fits):
            raise ValueError("the list may have biases or none, give a mapping with names")
        fits += undecided
        several = "the arrays fit several cells, say which by "
        raise AdviceError(several, Argument("cell="), f": {', '.join(fits)}")
    # names that fit are nearer to what was meant than names that do not
    near = {key: error for key, error in refusals.items() if not isinstance(error, NamesError)}
    told = {key: parts_of(error) for key, error in (near or refusals).items()}
    if len(set(told.values())) == 1:
        raise AdviceError(*next(iter(told.values())))
    parts: list[str] = []
    for key, reason in told.items():
        before = "; " if parts else f"the arrays fit no cell of {library.name}: "
        parts += [f"{before}{key}: ", *reason]
    raise AdviceError(*parts)


def _network(
    library: Library,
    layout: Layout,
    chains: list[Chain],
    named: int | None,
    bidirectional: bool | None,
) -> Network:
    """The network whose chains these are.

    Raises:
        ValueError: an array has another shape or dtype than the others ask for.
    """
    if library.stacked:
        chains, named = _unstacked(chains)
    before, first = chains[0]
    sizes = measure(layout, first, before)
    directions = _directions(layout, chains, sizes, named, bidirectional)
    spec = cells.lookup(layout.cell).spec(
        sizes.inputs, sizes.hidden, num_layers=len(chains) // directions,
        bidirectional=directions == 2, proj_size=sizes.proj,
    )  # fmt: skip
    dtype = next(iter(first.values())).dtype
    blocks: list[Blocks] = []
    for index, (before, arrays) in enumerate(chains):
        own = Sizes(spec.layer_input(index // directions), sizes.hidden, sizes.proj, sizes.heads)
        blocks.append({})
        for array in layout.arrays:
            if array.name in arrays:
                tensor = arrays[array.name]
                check(array, tensor, own, before)
                if tensor.dtype != dtype or not dtype.is_floating_point:
                    raise ValueError(
                        f"{before}{array.name} must be of one type of real numbers with the "
                        f"others, got {tensor.dtype} beside {dtype}"
                    )
                blocks[-1] |= read(array, tensor, own)
    return Network(spec.with_(bias_mode=mode_of(blocks)), dtype, blocks)


def _unstacked(chains: list[Chain]) -> tuple[list[Chain], int]:
    """Chains of one direction each, from arrays that hold both along their first axis."""
    made: list[Chain] = []
    counts = set()
    for before, arrays in chains:
        lengths = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in arrays.items()}
        if len(set(lengths.values())) != 1 or not {*lengths.values()} <= {1, 2}:
            raise ValueError(
                f"{before}arrays must have 1 or 2 directions along their first axis, got "
                + ", ".join(f"{length} in {name}" for name, length in lengths.items())
            )
        count = next(iter(lengths.values()))
        counts.add(count)
        for direction in range(count):
            made.append((before, {name: tensor[direction] for name, tensor in arrays.items()}))
    if len(counts) > 1:
        raise ValueError("layers must have the same number of directions, got 1 and 2")
    return made, counts.pop()


def _directions(
    layout: Layout, chains: list[Chain], sizes: Sizes, named: int | None, asked: bool | None
) -> int:
    """D, by names, by what the user says, or by the widths of inputs.

    Raises:
        ValueError: these contradict each other, or leave it open.
    """
    count = len(chains)
    if asked is not None and named not in (None, 1 + asked):
        raise ValueError(f"bidirectional is {asked}, the names have {named} directions")
    told = named if asked is None else 1 + asked
    if told is not None:
        if count % told:
            raise ValueError(f"two directions need pairs of arrays, got those of {count}")
        return told
    widths = [measure(layout, arrays, before).inputs for before, arrays in chains]
    out = sizes.proj or sizes.hidden
    fits = [
        D
        for D in (1, 2)
        if count % D == 0 and widths == [sizes.inputs] * D + [D * out] * (count - D)
    ]
    if len(fits) == 2:
        raise _UndecidedError(
            f"{count} sets of arrays of these shapes are layers or directions: say which by ",
            Argument("bidirectional="),
        )
    return fits[0] if fits else 1  # what does not fit is told where shapes are checked
