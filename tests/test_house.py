"""The house itself: imports go downstairs only, files stay small, a few habits hold everywhere."""

import ast
from pathlib import Path
from statistics import median

import forks
import pytest

ROOT = Path(__file__).parents[1] / "src" / "openrnn"
FILES = sorted(ROOT.rglob("*.py"))
KERNELS = sorted(path for kind in ("*.cuh", "*.cu", "*.cpp", "*.h") for path in ROOT.rglob(kind))
LINES, MEDIAN_LINES = 400, 200
HEAVY = {
    "cuda",
    "numba",
    "llvmlite",
    "matplotlib",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "rich",
    "safetensors",
    "tensorboard",
    "typer",
}

FLOORS = [  # bottom up: a room imports only from floors below its own, and from itself
    {"memo", "profiled", "progress", "rounds"},
    {
        "cores",
        "digest",
        "elf",
        "errors",
        "fresh",
        "frozen",
        "guards",
        "memory",
        "spec",
        "store",
        "philox",
        "printed",
        "tensors",
        "untraced",
    },
    {"names"},
    {"kernels", "native", "schedule"},
    {"cells", "params", "codegen"},
    {"tuning"},
    {"backends.base", "arguments"},
    {"time_reversed"},
    {"reference", "backends.*"},
    {"dispatch"},
    {"ahead", "problem_key"},
    {"route"},
    {"higher"},
    {"op"},
    {"flops", "packed", "transforms"},
    {"functional"},
    {"prepared_calls"},
    {"nn"},
    {"convert", "embed", "ops", "explain", "plain"},
    {"onnx", "watch"},
    {"bench", "info", "lm"},
    {"tune"},
    {"cli"},
    {"__init__", "__main__"},
]


def name_of(path):
    """The path of a module inside the package, without suffix: nn/layers.py -> nn.layers."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module):
    """The file or folder on the first storey; each backend is a room of its own."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0] if rest else '__init__'}" if first == "backends" else first


def floor_of(room):
    kind = "backends.*" if room.startswith("backends.") and room != "backends.base" else room
    for height, rooms in enumerate(FLOORS):
        if kind in rooms:
            return height
    pytest.fail(f"room {room} stands on no floor: add it to FLOORS")


def is_module(name):
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def executed(node):
    """All nodes below, but for what stands under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield child
            yield from executed(child)


def absolute(node, module):
    """The full name of the module that a `from` import, relative or not, starts from."""
    if not node.level:
        return node.module
    package = ["openrnn", *module.split(".")][: -node.level]
    return ".".join([*package, node.module] if node.module else package)


def called(node):
    """The last word of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def inner_imports(source, module):
    """The modules of this package that a module of it imports, at its top or inside functions."""
    found = set()
    for node in executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else base for name in names}
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            found |= {str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    split = (name.partition(".") for name in found)
    return {module or "__init__" for package, _, module in split if package == "openrnn"}


def upstairs(source, module):
    """The imports of a module that do not go down."""
    room = room_of(module)
    return sorted(
        other
        for other in inner_imports(source, module)
        if room_of(other) != room and floor_of(room_of(other)) >= floor_of(room)
    )


def habits_broken(source):
    """What no module of the package does: assert, read the environment, lack a first line."""
    tree = ast.parse(source)
    broken = [] if (ast.get_docstring(tree) or "").strip() else ["no docstring"]
    for node in ast.walk(tree):
        names = {getattr(node, "attr", None), getattr(node, "id", None)}
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Assert):
            broken.append(f"assert in line {node.lineno}")
        elif names & {"environ", "environb", "getenv", "getenvb", "putenv"}:
            broken.append(f"environment in line {node.lineno}")
    return broken


def length(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def faults(asked, paths):
    """What is wrong with each file, by name; a test of each would cost more than its look."""
    found = {str(path.relative_to(ROOT)): asked(path) for path in paths}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_a_room_looks_only_downstairs():
    def wrong_imports(path):
        return upstairs(path.read_text(encoding="utf-8"), name_of(path))

    assert faults(wrong_imports, FILES) == {}


def test_habits():
    assert faults(lambda path: habits_broken(path.read_text(encoding="utf-8")), FILES) == {}


def test_lines_of_kernels_are_as_short_as_those_of_python():
    """Which ruff holds to the same 100 columns."""

    def long_lines(path):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [number for number, line in enumerate(lines, 1) if len(line) > 100]

    assert KERNELS
    assert faults(long_lines, KERNELS) == {}


def test_no_room_outgrows_the_house():
    assert faults(lambda path: max(length(path) - LINES, 0), FILES + KERNELS) == {}


def test_most_files_are_short():
    sizes = [length(path) for path in FILES + KERNELS if path.name != "__init__.py"]
    assert median(sizes) < MEDIAN_LINES


def test_the_import_is_light():
    """`import openrnn` asks for no heavy package, so it works where they are missing."""
    program = (
        "import torch, sys; old = {*sys.modules}; import openrnn; print(*{*sys.modules} - old)"
    )
    ran = forks.process(program)  # a fork has modules of torch already
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.split()
    assert "openrnn" in loaded
    assert not HEAVY & {name.partition(".")[0] for name in loaded}


# and the tests themselves, on planted faults


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("spec", "import openrnn", ["__init__"]),
        ("spec", "from openrnn import LSTM", ["__init__"]),
        ("spec", "from openrnn.errors import CellError", ["errors"]),
        ("spec", "def f():\n    from openrnn import cells", ["cells"]),
        ("spec", "import importlib\nimportlib.import_module('openrnn.cells')", ["cells"]),
        ("cells", "from .params import Chain", ["params"]),
        ("cells", "from .spec import Spec\nimport torch", []),
        ("backends.base", "from openrnn import reference", ["reference"]),
        ("backends.cpu", "from .base import Backend", []),
        ("backends.cpu", "from ..backends import cells", ["backends"]),
        ("backends.base", "from openrnn.nn.layers import LSTM", ["nn.layers"]),
        ("nn.layers", "from .base import Recurrent\nfrom openrnn.nn import cells", []),
        (
            "nn.layers",
            "if TYPE_CHECKING:\n    import openrnn.cli\nelse:\n    import openrnn.spec",
            [],
        ),
        ("nn.layers", "if torch.TYPE:\n    import openrnn", ["__init__"]),
        ("__init__", "from openrnn.spec import Spec\nfrom . import cells", []),
    ],
)
def test_a_look_upstairs_is_seen(module, source, wrong):
    assert upstairs(source, module) == wrong


@pytest.mark.parametrize(
    "source",
    ["import torch", "'''Doc.'''\nassert x", "'''Doc.'''\nimport os\nos.environ['X']",
     "'''Doc.'''\nfrom os import getenv", "'''Doc.'''\nfrom os import environ as e"],
)  # fmt: skip
def test_a_broken_habit_is_seen(source):
    assert len(habits_broken(source)) == 1
