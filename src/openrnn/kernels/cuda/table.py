"""Tables of a kernel's arguments: one class each, for the kernel's struct and for its launches.

A table prints the CUDA struct that the kernel takes as its only parameter, and an object of it is
what a launch passes, filled by name. Every field is 8 bytes wide and pointers are numbers, 0 for
null, so that both sides agree on offsets by the order of fields alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

from typing_extensions import dataclass_transform

States = Sequence[int]  # a pointer for each state of the cell, an array of STATES in the struct
Table = TypeVar("Table", bound="type[Args]")


class Field(NamedTuple):
    """A field of a struct: `array` has one pointer for each state of the cell."""

    name: str
    cuda: str
    meaning: str
    array: bool


class Args:
    """Arguments of a launch, given by name; what the table has a value for may be left out.

    Raises:
        TypeError: a name is not in the table, or one without a value is missing.
        AttributeError: a name that is not in the table is set later.
    """

    __slots__ = ()
    fields: ClassVar[tuple[Field, ...]]
    _numbers: ClassVar[Any]  # getters of several fields at once: a launch costs microseconds
    _arrays: ClassVar[Any]  # of two arrays or more, or None

    def words(self) -> list[int]:
        """The fields as the struct has them."""
        numbers: tuple[int, ...] = self._numbers(self)
        if self._arrays is None:
            return [*numbers]
        return [*numbers, *chain.from_iterable(self._arrays(self))]

    @classmethod
    def word_index(cls, name: str) -> int:
        """The index of a number among the words; all arrays come after the numbers."""
        return [field.name for field in cls.fields].index(name)

    @classmethod
    def pointers(cls, words: Sequence[int]) -> list[int]:
        """Where pointers stand among the words of all structs; arrays share what numbers leave."""
        names = [field.name for field in cls.fields]
        arrays = sum(field.array for field in cls.fields)
        one = len(words) if arrays else len(names)
        structs = words[names.index("layers")] if "layers" in names else len(words) // one
        entries = (len(words) // structs - len(names) + arrays) // arrays if arrays else 0
        points: list[bool] = []
        for field in cls.fields:
            points += ["*" in field.cuda] * (entries if field.array else 1)
        return [index for index, one in enumerate(points * structs) if one]

    @classmethod
    def struct(cls) -> str:
        """The kernel's parameter in CUDA C++; STATES is a constant of its source."""
        lines = [f"struct {cls.__name__} {{"]
        for name, cuda, meaning, array in cls.fields:
            declared = f"    {cuda} {name}{'[STATES]' if array else ''};"
            lines.append(f"{declared:<44}// {meaning}")
        return "\n".join([*lines, "};"])


class PreparedArgs:
    """Arguments of many launches, of which each gives only those that differ.

    Args:
        table: of the kernel.
        shared: the fields that are the same in all launches, by name.
    """

    def __init__(self, table: type[Args], **shared: int) -> None:
        self._table, self._shared, self._names = table, tuple(shared.values()), tuple(shared)
        # how to put the numbers that a launch gives, and those shared, in the order of the struct
        self._orders: dict[tuple[str, ...], Any] = {}
        self._arrays = sum(field.array for field in table.fields)

    def words(self, **given: int | States) -> list[int]:
        """The words of a launch, which gives all other fields by name, arrays last.

        Raises:
            TypeError: a name is not in the table, or a field is missing or given twice.
        """
        order = self._orders.get(names := tuple(given)) or self._order(names)
        values: tuple[Any, ...] = tuple(given.values())
        if not self._arrays:
            return [*order(values + self._shared)]
        numbers, arrays = values[: -self._arrays], values[-self._arrays :]
        return [*order(numbers + self._shared), *chain.from_iterable(arrays)]

    def _order(self, given: tuple[str, ...]) -> Any:
        wanted = [field.name for field in self._table.fields]
        count = len(wanted) - self._arrays
        begin = len(given) - self._arrays
        numbers = [*given[:begin], *self._names]
        if sorted((*given, *self._names)) != sorted(wanted) or [*given[begin:]] != wanted[count:]:
            raise TypeError(
                f"a launch of {self._table.__name__} gives {', '.join(given)} besides "
                f"{', '.join(self._names)}, needs {', '.join(wanted)}"
            )
        found = self._orders[given] = itemgetter(*map(numbers.index, wanted[:count]))
        return found


@dataclass_transform(kw_only_default=True, eq_default=False)
def table(cls: Table) -> Table:
    """Makes a table of a class whose annotations are (Python type, CUDA type, meaning)."""
    made: Any = dataclass(kw_only=True, eq=False, slots=True)(cls)
    hints = get_type_hints(made, include_extras=True)
    found = []
    for name in made.__slots__:
        cuda, meaning = hints[name].__metadata__
        found.append(Field(name, cuda, meaning, get_args(hints[name])[0] is not int))
    if sorted(found, key=lambda field: field.array) != found or sum(f.array for f in found) == 1:
        raise TypeError(f"{cls.__name__} needs its arrays last, and not a single one")
    numbers = [field.name for field in found if not field.array]
    arrays = [field.name for field in found if field.array]
    made.fields = tuple(found)
    made._numbers = attrgetter(*numbers)
    made._arrays = attrgetter(*arrays) if arrays else None
    return made  # type: ignore[no-any-return]
