"""The API reference: every public name is in it once, and every name in it exists."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from public_names import look_up

import openrnn

API = Path(__file__).parents[1] / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. auto(class|function|exception|module|data):: (\S+)$", re.MULTILINE)
MODULES = (openrnn, openrnn.ops, openrnn.codegen)  # of which every name is public


def named():
    """What the reference has: kind and name."""
    return [
        found
        for page in sorted(API.glob("*.rst"))
        for found in DIRECTIVE.findall(page.read_text(encoding="utf-8"))
    ]


def public(module):
    """The names that a module hands out, but for the modules below it."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    for name in names:
        item = getattr(module, name)
        here = getattr(item, "__module__", "") or ""
        if not isinstance(item, ModuleType) and here.startswith("openrnn"):
            yield f"{module.__name__}.{name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    missing = sorted(set(public(module)) - {name for _, name in named()})
    assert not missing, f"docs/api lacks {', '.join(missing)}"


def test_every_name_of_the_reference_exists_once():
    names = [name for _, name in named()]
    assert len(names) == len(set(names))
    for kind, name in named():
        item = look_up(name)
        kinds = {"class": inspect.isclass, "exception": inspect.isclass,
                 "function": callable, "module": inspect.ismodule}  # fmt: skip
        assert kinds[kind](item), (kind, name)


@pytest.mark.parametrize("name", sorted(name for kind, name in named() if kind == "function"))
def test_a_function_says_what_it_takes_and_raises(name):
    """A docstring of one line is enough where there is little to say."""
    said = inspect.getdoc(look_up(name))
    assert said
    assert said[0].isupper(), said
    if said.count("\n") > 4:
        assert "Example:" in said or "Raises:" in said, f"{name} has neither Raises nor Example"
