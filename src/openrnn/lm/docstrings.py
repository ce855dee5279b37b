"""The text that ships with every Python: the documentation strings of its standard library."""

import ast
import warnings
from collections.abc import Iterator

from openrnn.lm.corpus import read_files

TESTS = {"test", "tests", "idle_test"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> list[tuple[str, bytes]]:
    """All documentation strings of each module but tests, under the module's relative path."""
    found = []
    for name, source in read_files(None):
        if TESTS & set(name.split("/")) or b'"""' not in source:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some modules have escapes that Python dislikes
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        text = "\n".join(_of(tree))
        if text:
            found.append((name, text.encode("utf-8", "replace")))
    return found


def _of(node: ast.AST) -> Iterator[str]:
    """The texts of a module, class or function and of what is defined directly in it."""
    if isinstance(node, DOCUMENTED):
        text = ast.get_docstring(node)
        if text:
            yield text
        for inner in node.body:
            yield from _of(inner)
