"""The public names of OpenRNN with their parameters; run this file to write the list anew."""

import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "data" / "public_names.txt"
MODULES = ("openrnn", "openrnn.cells", "openrnn.codegen", "openrnn.nn", "openrnn.onnx",
           "openrnn.ops", "openrnn.params")  # fmt: skip
DOCUMENTED = re.compile(r"^\.\. auto(?:class|function|exception):: (\S+)$", re.MULTILINE)


def names():
    """The names in `__all__` of the public modules, and those of the API reference."""
    found = set()
    for name in MODULES:
        module = importlib.import_module(name)
        found |= {f"{name}.{one}" for one in module.__all__}
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        found |= set(DOCUMENTED.findall(page.read_text(encoding="utf-8")))
    return sorted(found)


def look_up(name):
    """The object of a dotted name; a function may have the name of the module that it is from."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        item = importlib.import_module(".".join(parts[:count]))
        for part in parts[count:]:
            item = getattr(item, part, None)
        if item is not None:
            return item
    raise AttributeError(name)


def parameters(item):
    """The names of what a function or class takes."""
    if not callable(item) or (inspect.isclass(item) and issubclass(item, BaseException)):
        return []
    found = (one.name for one in inspect.signature(item).parameters.values())
    return [name for name in found if not name.startswith("_")]


def lines():
    """The list: a name and its parameters a line."""
    return [" ".join([name, *parameters(look_up(name))]) for name in names()]


if __name__ == "__main__":
    LIST.write_text("\n".join(lines()) + "\n", encoding="utf-8")
