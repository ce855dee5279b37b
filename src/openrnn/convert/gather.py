"""Which arrays of a mapping belong to which layer and direction, by their names or their order."""

import re
from collections.abc import Callable, Iterator

from torch import Tensor

from openrnn.convert.advice import AdviceError, Argument
from openrnn.convert.arrays import FORWARD, REVERSE, Arrays, by_number, listed
from openrnn.convert.layouts import Array, Layout, Library
from openrnn.spec import Spec

# the arrays of one layer and direction by the layout's names, and what stands before them
Chain = tuple[str, Arrays]


class NamesError(AdviceError):
    """The names, or the number, of the arrays are not those of a layout."""


def candidates(
    library: Library, layout: Layout, arrays: Arrays, in_order: bool
) -> Iterator[tuple[list[Chain], int | None]]:
    """Each way to sort arrays into layers and directions; and D, where names say it.

    Layer-major, forward before reverse. A stacked library gives one chain for each layer.

    Raises:
        NamesError: there is no way, as an array is missing or has a name that none fits.
    """
    if library.names:
        yield _by_pattern(library, layout, arrays)
    elif library.lists:
        yield _by_lists(layout, arrays), None
    elif all(name.replace("/", "").isdigit() for name in arrays):
        yield from ((chains, None) for chains in _by_order(layout, list(arrays.values())))
    else:
        yield _by_prefix(layout, arrays, in_order)


def named(
    library: Library, layout: Layout, spec: Spec, chains: list[Arrays]
) -> Iterator[tuple[str, Tensor]]:
    """Arrays of layers and directions, or of layers of a stacked library, by their full names."""
    if library.lists:
        for kind in ("weights", "biases"):
            every = [chain[name] for chain in chains for name in chain if name.startswith(kind)]
            yield from ((f"{kind}/{index}", tensor) for index, tensor in enumerate(every))
        return
    per = 1 if library.stacked else spec.directions
    for index, chain in enumerate(chains):
        layer, direction = divmod(index, per)
        before = _before(library, layout, spec, layer, direction)
        for name, tensor in chain.items():
            full = _name(library, name, layer, direction) if library.names else before + name
            yield full, tensor


def _before(library: Library, layout: Layout, spec: Spec, layer: int, direction: int) -> str:
    """What stands before names that are the same in each layer and direction."""
    if library.prefixes:
        pattern = library.prefixes[spec.bidirectional] + layout.scope
        return pattern.format(layer=layer, direction=library.directions[direction])
    before = "" if spec.num_layers == 1 else f"layer{layer}/"
    if spec.bidirectional and not library.stacked:
        before += ("forward/", "backward/")[direction]
    return before


def _name(library: Library, array: str, layer: int, direction: int) -> str:
    return library.names.format(array=array, layer=layer, direction=library.directions[direction])


def _recurrent(layout: Layout) -> Array:
    """An array without which there is no layer."""
    return next(array for array in layout.arrays if "R" in array.sides)


def _complete(layout: Layout, chain: Arrays, name: Callable[[str], str]) -> None:
    """Raises NamesError where a chain lacks an array; `name` gives an array's full name."""
    biases = [array.name for array in layout.arrays if array.bias]
    wanted = [array.name for array in layout.arrays if not array.bias and not array.optional]
    if layout.biases == "always" or (
        layout.biases == "optional" and any(bias in chain for bias in biases)
    ):
        wanted += biases
    for missing in (array for array in wanted if array not in chain):
        raise NamesError(f"there is no array {name(missing)}")


def _by_pattern(library: Library, layout: Layout, arrays: Arrays) -> tuple[list[Chain], int]:
    key = _recurrent(layout).name
    first = _name(library, key, 0, 0)
    before = {name.removesuffix(first) for name in arrays if name.endswith(first)}
    if not before:
        raise NamesError(f"there is no array {first}, only {listed(arrays)}")
    if len(before) > 1:
        found = ", ".join(repr(prefix) for prefix in sorted(before))
        several = "there are several networks, choose one by "
        raise NamesError(several, Argument("prefix="), f": {found}")
    (prefix,) = before
    arrays = {name: array for name, array in arrays.items() if name.startswith(prefix)}
    both = prefix + _name(library, key, 0, 1) in arrays
    layers = 0
    while prefix + _name(library, key, layers, 0) in arrays:
        layers += 1
    chains: list[Chain] = []
    known = set()
    for layer in range(layers):
        for direction in range(1 + both):
            full = {
                array.name: prefix + _name(library, array.name, layer, direction)
                for array in layout.arrays
            }
            chain = {short: arrays[name] for short, name in full.items() if name in arrays}
            _complete(layout, chain, full.__getitem__)
            known |= {*full.values()}
            chains.append((f"layer {layer}{' reverse' * direction}: ", chain))
    for name in arrays:
        if name not in known:
            raise NamesError(f"{name} is no array of {layers} layers in {1 + both} directions")
    return chains, 1 + both


def _by_lists(layout: Layout, arrays: Arrays) -> list[Chain]:
    """Two lists, weights and biases, cut into layers and directions."""
    lists: dict[str, list[Tensor]] = {"weights": [], "biases": []}
    for name, tensor in arrays.items():
        kind = {"0": "weights", "1": "biases"}.get(name.split("/")[0], name.split("/")[0])
        if kind not in lists:
            raise NamesError(f"needs two lists, weights and biases, got {name}")
        lists[kind].append(tensor)
    names = {kind: [array.name for array in layout.arrays if array.name.startswith(kind)]
             for kind in lists}  # fmt: skip
    count, over = divmod(len(lists["biases"]), len(names["biases"]))
    plain = names["weights"][: len(names["biases"])]  # without a projection
    if count and len(lists["weights"]) != count * len(names["weights"]):
        names["weights"] = plain
    if not count or over or len(lists["weights"]) != count * len(names["weights"]):
        raise NamesError(
            f"needs {len(plain)} weights and biases of each layer and direction, got "
            f"{len(lists['weights'])} weights and {len(lists['biases'])} biases"
        )
    return [
        (
            f"layer and direction {index}: ",
            {
                name: lists[kind][index * len(names[kind]) + k]
                for kind in lists
                for k, name in enumerate(names[kind])
            },
        )
        for index in range(count)
    ]


def _by_order(layout: Layout, arrays: list[Tensor]) -> Iterator[list[Chain]]:
    """Arrays in the layout's order, chain after chain, with biases or without."""
    plain = [array for array in layout.arrays if not array.optional]
    choices = [plain]
    if layout.biases != "always":
        choices.append([array for array in plain if not array.bias])
    found = False
    for row in choices:
        if arrays and len(arrays) % len(row) == 0:
            found = True
            starts = range(0, len(arrays), len(row))
            yield [
                (
                    f"array {start} and after: ",
                    {array.name: arrays[start + index] for index, array in enumerate(row)},
                )
                for start in starts
            ]
    if not found:
        order = ", ".join(array.name for array in plain)
        raise NamesError(f"needs {order} of each layer and direction, got {len(arrays)} arrays")


def _by_prefix(layout: Layout, arrays: Arrays, in_order: bool) -> tuple[list[Chain], int | None]:
    words = {array.name for array in layout.arrays}
    key = _recurrent(layout).name
    groups: dict[str, Arrays] = {}
    for name, tensor in arrays.items():
        for word in words:
            before = _plain(name).removesuffix(word)
            if _plain(name).endswith(word) and (not before or before[-1] in "/."):
                groups.setdefault(before, {})[word] = tensor
    groups = {before: chain for before, chain in groups.items() if key in chain}  # no dense layers
    if not groups:
        raise NamesError(f"there is no array {key}, only {listed(arrays)}")
    for before, chain in groups.items():
        _complete(layout, chain, before.__add__)
        inner = [other for other in groups if len(other) > len(before)]
        for name in arrays:
            known = _plain(name).removeprefix(before) in chain or name.startswith((*inner,))
            if name.startswith(before) and not known:
                raise NamesError(f"{name} is no array of {', '.join(sorted(words))}")
    return _by_direction(groups, in_order)


def _plain(name: str) -> str:
    """A name without the number that TensorFlow puts behind a variable."""
    return re.sub(r":\d+$", "", name)


def _by_direction(groups: dict[str, Arrays], in_order: bool) -> tuple[list[Chain], int | None]:
    """Layers in their order, forward before reverse, where names say what is reverse."""
    words = {re.sub(r"_?\d+", "", REVERSE.sub("", FORWARD.sub("", name))) for name in groups}
    if len(words) == 1:
        groups = {name: groups[name] for name in sorted(groups, key=by_number)}
    elif not in_order:
        raise ValueError(
            f"the names do not say which layer is before which, take one by its prefix: "
            f"{listed(groups)}"
        )
    reverse = [name for name in groups if REVERSE.search(name)]
    if not reverse:
        return [*groups.items()], None
    forward = [name for name in groups if name not in reverse]
    if len(forward) != len(reverse):
        raise NamesError(
            f"each layer needs both directions or none, got {len(forward)} forward and "
            f"{len(reverse)} reverse: {listed(groups)}"
        )
    pairs = zip(forward, reverse)
    return [(name, groups[name]) for pair in pairs for name in pair], 2
