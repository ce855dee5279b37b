"""No public name vanishes, nor a parameter of one: CONTRIBUTING says how one is taken out."""

import importlib
from pkgutil import iter_modules
from types import FunctionType, ModuleType

import public_names
import pytest

LISTED = public_names.LIST.read_text(encoding="utf-8").splitlines()
RENEW = ".venv/bin/python tests/public_names.py writes the list anew"


@pytest.mark.parametrize("line", LISTED, ids=lambda line: line.partition(" ")[0])
def test_a_listed_name_is_there_with_its_parameters(line):
    name, *wanted = line.split()
    taken = public_names.parameters(public_names.look_up(name))
    gone = [one for one in wanted if one not in taken]
    assert not gone, f"{name} has no parameter {', '.join(gone)} any more: see CONTRIBUTING"


def test_every_public_name_is_listed():
    listed = {line.partition(" ")[0] for line in LISTED}
    new = [name for name in public_names.names() if name not in listed]
    assert not new, f"{', '.join(new)}: {RENEW}"


@pytest.mark.parametrize("name", public_names.MODULES)
def test_what_a_module_lists_is_there(name):
    module = public_names.look_up(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for one in module.__all__:
        assert hasattr(module, one), one


def test_what_the_package_hands_out_is_in_its_list():
    """An import in `__init__.py` is public: it belongs into `__all__`, or it has an underscore."""
    package = public_names.look_up("openrnn")
    given = {
        name for name, item in vars(package).items()
        if not name.startswith("_") and not isinstance(item, ModuleType)
    }  # fmt: skip
    assert given <= set(package.__all__)


def test_every_module_that_the_package_hands_out_has_a_list():
    package = public_names.look_up("openrnn")
    handed = {f"openrnn.{name}" for name in package.__all__
              if isinstance(getattr(package, name), ModuleType)}  # fmt: skip
    assert handed <= {*public_names.MODULES}
    listed = {
        module.name for module in iter_modules(package.__path__, "openrnn.")
        if not isinstance(getattr(package, module.name.partition(".")[2], None), FunctionType)
        and "__all__" in vars(importlib.import_module(module.name))
    }  # fmt: skip
    assert listed - {*public_names.MODULES} == {"openrnn.cli", "openrnn.philox"}  # which re-export


def test_a_name_that_vanished_is_seen(monkeypatch):
    monkeypatch.delattr("openrnn.ops.params_size")
    with pytest.raises((AttributeError, ImportError)):
        test_a_listed_name_is_there_with_its_parameters("openrnn.ops.params_size spec")
    with pytest.raises(AssertionError, match="has no parameter gone any more"):
        test_a_listed_name_is_there_with_its_parameters("openrnn.convert model gone")
