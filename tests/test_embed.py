"""Layers as C libraries: the bits of the layer however calls are cut, from C and from C++."""

import copy
import ctypes
import json
import shutil
import subprocess
import sys

import pytest
import torch
from cases import thinned
from torch import nn

import openrnn
from openrnn.backends.cpu.baked import baked
from openrnn.embed import export, header, names, targets
from openrnn.embed.undefined import undefined
from openrnn.kernels.cpu import objects
from openrnn.spec import Problem

COMPILER = shutil.which("cc")
needs_cc = pytest.mark.skipif(COMPILER is None, reason="no C compiler is here")
T = 150
LAYERS = {
    "lstm": lambda: openrnn.LSTM(3, 16),
    "layers": lambda: openrnn.LSTM(3, 40, 2),
    "odd": lambda: openrnn.GRU(5, 13, 3, bias=False),
    "projection": lambda: openrnn.LSTM(7, 24, proj_size=5, cell_clip=0.5),
    "peephole": lambda: openrnn.Recurrent(openrnn.cells.peephole_lstm, 4, 20),
    "skip": lambda: openrnn.GRU(18, 18, input_mode="skip"),
    "gates": lambda: openrnn.GRU(39, 13, input_mode="gates"),
    "float64": lambda: openrnn.LSTM(3, 10, dtype=torch.float64),
}


class Native:
    """An exported layer, loaded."""

    def __init__(self, layer, folder, name="net", **options):
        self.files = openrnn.export_native(layer, folder / name, **options)
        self.library = ctypes.CDLL(str(self.files[2]))
        step, self.reset = (getattr(self.library, f"{name}_{what}") for what in ("step", "reset"))
        step.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]
        text = self.files[0].read_text()
        work = int(text.split("work[")[1].split("]")[0])
        self.dtype = next(layer.parameters()).dtype
        self.shapes = [(layer.num_layers, 1, width) for width in layer.spec.state_sizes]
        size = sum(shape[0] * shape[2] for shape in self.shapes) * self.dtype.itemsize
        self.memory, self.step, self.outputs = (
            ctypes.create_string_buffer(b"\xff" * (size + work), size + work), step,
            layer.spec.output_size,
        )  # fmt: skip
        self.reset(self.memory)

    def __call__(self, x, cuts=(T,)):
        y = torch.full((len(x), 1, self.outputs), float("nan"), dtype=self.dtype)
        begin = 0
        for count in cuts:
            self.step(self.memory, x[begin:].data_ptr(), y[begin:].data_ptr(), count)
            begin += count
        assert begin == len(x)
        return y

    def states(self):
        found, at = [], 0
        for shape in self.shapes:
            size = shape[0] * shape[2] * self.dtype.itemsize
            flat = torch.frombuffer(bytearray(self.memory.raw[at : at + size]), dtype=self.dtype)
            found.append(flat.view(shape))
            at += size
        return found


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread):
    """The bits of a layer are those of one thread."""


@pytest.fixture(scope="module")
def answers():
    """What compiling processes answered."""
    return {}


@pytest.fixture
def asked_once(answers, monkeypatch):
    """A request is the text that a compiling process reads: who asks for the same is told again."""
    ask = objects._in_a_process

    def answer(asked):
        text = json.dumps(asked)
        if text not in answers:
            answers[text] = ask(asked)
        return answers[text]

    monkeypatch.setattr(objects, "_in_a_process", answer)


def plain(**options):
    """A layer of the same weights each time, so that its exports are one request."""
    torch.manual_seed(0)
    return openrnn.LSTM(3, 16, **options)


@needs_cc
@pytest.mark.parametrize(
    "name",
    thinned(["odd", "layers", "projection", "float64", "peephole", "skip"], 6),
)
def test_bits_are_those_of_the_layer_however_calls_are_cut(tmp_path, name):
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    dtype = next(layer.parameters()).dtype
    x = torch.randn(T, 1, layer.input_size, dtype=dtype)
    with torch.no_grad():
        wanted, states = layer(x)
    states = states if isinstance(states, tuple) else (states,)
    native = Native(layer, tmp_path)
    for cuts in ((T,), (1,) * T, (64, 0, 1, 85), (100, 50)):
        native.reset(native.memory)
        assert torch.equal(native(x, cuts), wanted)
        assert all(map(torch.equal, native.states(), states))


@needs_cc
def test_any_block_gives_the_same(tmp_path):
    layer = LAYERS["layers"]().eval()
    x = torch.randn(T, 1, 3)
    with torch.no_grad():
        wanted, _ = layer(x)
    assert torch.equal(Native(layer, tmp_path, block=7)(x), wanted)


def test_no_weight_is_rounded(tmp_path, asked_once):
    """Where `precision="bf16"` permits it, too."""
    for name, options in (("amp", {}), ("rounds", {"precision": "bf16"})):
        openrnn.export_native(plain(**options), tmp_path / name / "amp", compiler=None)
    found, wanted = ((tmp_path / name / "amp.o").read_bytes() for name in ("rounds", "amp"))
    assert found == wanted


@needs_cc
def test_weights_are_those_of_the_export(tmp_path, asked_once):
    layer = plain().eval()
    x = torch.randn(T, 1, 3)
    with torch.no_grad():
        native, wanted = Native(layer, tmp_path), layer(x)[0]
        for parameter in layer.parameters():
            parameter.add_(1)
        assert torch.equal(native(x), wanted)


PROGRAM = """
#include <stdio.h>
#include "one.h"
#include "two.h"
static one_t a; static two_t b;
int main(void) {
    float x[6] = {1, 2, 3, 4, 5, 6}, y[2 * one_OUTPUTS], z[2 * two_OUTPUTS];
    one_reset(&a); two_reset(&b);
    a.h[0][1] = 0.5f;
    one_step(&a, x, y, 2); two_step(&b, x, z, 2);
    printf("%.9g %.9g %.9g\\n", y[one_OUTPUTS], z[two_OUTPUTS + 3], a.c[0][2]);
    return 0;
}
"""


@needs_cc
@pytest.mark.parametrize("language", thinned(["c", "c++"], 2))
def test_two_layers_in_one_program(tmp_path, language):
    """Their kernels differ, their symbols do not meet; headers are C and C++ without a warning."""
    torch.manual_seed(0)
    one, two = openrnn.LSTM(3, 16), openrnn.GRU(3, 8, 2)
    openrnn.export_native(one, tmp_path / "one")
    openrnn.export_native(two, tmp_path / "two")
    source, program = tmp_path / "main.c", tmp_path / "main"
    source.write_text(PROGRAM)
    made = subprocess.run(
        [COMPILER, "-Wall", "-Wextra", "-Werror", "-x", language, source, "-x", "none",
         tmp_path / "one.o", tmp_path / "two.o", "-o", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if language == "c++" and "cc1plus" in made.stderr:
        pytest.skip("no C++ compiler is here")
    assert made.returncode == 0, made.stderr
    found = [float(word) for word in subprocess.check_output([program], text=True).split()]
    x, h = torch.arange(1.0, 7).view(2, 1, 3), torch.zeros(1, 1, 16)
    h[0, 0, 1] = 0.5
    with torch.no_grad():
        y, (_, c) = one(x, (h, torch.zeros(1, 1, 16)))
        z, _ = two(x)
    torch.testing.assert_close(found, [y[1, 0, 0].item(), z[1, 0, 3].item(), c[0, 0, 2].item()])


@needs_cc
def test_programs_see_two_functions(tmp_path, asked_once):
    native = Native(plain(), tmp_path)
    for name in ("openrnn_loop", "openrnn_row", "openrnn_data", "forward"):
        assert not hasattr(native.library, name)


@pytest.mark.slow
@needs_cc
def test_an_older_processor(tmp_path):
    torch.manual_seed(0)
    layer = LAYERS["layers"]().eval()
    try:
        targets.check("x86-64-v2")
    except ValueError as error:
        pytest.skip(str(error))
    native = Native(layer, tmp_path, cpu="x86-64-v2")
    assert "for x86-64-v2" in native.files[0].read_text()
    x = torch.randn(T, 1, 3)
    with torch.no_grad():
        torch.testing.assert_close(native(x), layer(x)[0])
    if shutil.which("objdump"):
        code = subprocess.check_output(["objdump", "-d", native.files[1]], text=True)
        assert "xmm" in code
        assert "ymm" not in code


ON_ARM = """
#include "net.h"
#include <stdio.h>
static net_t net; static REAL x[STEPS * net_INPUTS], y[STEPS * net_OUTPUTS];
int main(void) {
    net_reset(&net);
    if (fread(x, sizeof x, 1, stdin) != 1) return 1;
    net_step(&net, x, y, STEPS);
    return fwrite(y, sizeof y, 1, stdout) != 1;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers", "odd", "projection", "peephole", "float64"])
def test_64_bit_arm(tmp_path, name):
    """Run by an emulator where there is one; its bits are this machine's, by the order of sums."""
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    header, code = openrnn.export_native(layer, tmp_path / "net", cpu="aarch64")
    content = code.read_bytes()
    assert int.from_bytes(content[18:20], "little") == 183  # EM_AARCH64
    assert "for aarch64-linux-gnu" in header.read_text()
    needed = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    if not all(map(shutil.which, needed)):
        pytest.skip(f"{' or '.join(needed)} is not here")
    x = torch.randn(T, 1, layer.input_size, dtype=next(layer.parameters()).dtype)
    real = "double" if x.dtype == torch.float64 else "float"
    (tmp_path / "main.c").write_text(ON_ARM)
    defined = [f"-DREAL={real}", f"-DSTEPS={T}", "-I", tmp_path]
    program = tmp_path / "main"
    subprocess.run(
        [needed[0], "-static", *defined, tmp_path / "main.c", code, "-o", program, "-lm"],
        check=True, capture_output=True,
    )  # fmt: skip
    given = x.numpy().tobytes()
    out = subprocess.check_output([needed[1], program], input=given)
    y = torch.frombuffer(bytearray(out), dtype=x.dtype).view(T, -1)
    with torch.no_grad():
        torch.testing.assert_close(y, layer(x)[0][:, 0])


def test_without_a_compiler_there_is_no_library(tmp_path, monkeypatch, asked_once):
    """Nor one of an earlier export."""
    path = tmp_path / "sub" / "net"
    path.parent.mkdir()
    (tmp_path / "sub" / "net.so").write_bytes(b"older")
    monkeypatch.setattr(export.shutil, "which", lambda name: None)
    files = openrnn.export_native(plain(), path)
    assert not (tmp_path / "sub" / "net.so").exists()
    assert [file.name for file in files] == ["net.h", "net.o"]
    assert all(file.stat().st_size for file in files)


def test_a_linker_that_fails_is_told(tmp_path, asked_once):
    with pytest.raises(openrnn.OpenRNNError, match="cannot link"):
        openrnn.export_native(plain(), tmp_path / "net", compiler="false")


@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        (lambda: openrnn.LSTM(3, 4, bidirectional=True), {}, "a layer that runs forward"),
        (lambda: openrnn.LSTM(3, 4, reverse=True), {}, "a layer that runs forward"),
        (lambda: openrnn.LSTM(3, 4, dtype=torch.bfloat16), {}, "needs a layer of float32 or"),
        (lambda: openrnn.LSTM(3, 4), {"path": "my-amp"}, "must be a C identifier such as amp"),
        (lambda: openrnn.LSTM(3, 4), {"block": 0}, "block must be a number of steps from 1"),
        (lambda: openrnn.LSTM(3, 4), {"cpu": "z80"}, "cpu must be None or one of x86-64-v2"),
        (lambda: openrnn.LSTM(3, 4), {"path": "int8"}, "int8_t is a type of C's library"),
        (lambda: openrnn.LSTM(3, 4), {"block": 1 << 40}, "from 1 to 65536"),
        (
            lambda: openrnn.LSTM(3, 4),
            {"compiler": "no-such-cc"},
            "the compiler no-such-cc is not on the PATH",
        ),
        (lambda: openrnn.LSTM(3, 4, device="meta"), {}, "got one without values"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, layer, options, words):
    path = tmp_path / options.pop("path", "net")
    with pytest.raises(ValueError, match=words):
        openrnn.export_native(layer(), path, **options)
    assert not list(tmp_path.iterdir())


@openrnn.cell(gates="z", states="h")
def rooted(x, r, s):
    """A square root, for which the kernels have no polynomial."""
    return torch.tanh(torch.sqrt(s.h * s.h + 1) * (x.z + r.z))


@needs_cc
@pytest.mark.parametrize(
    "make",
    thinned(
        [pytest.param(lambda: openrnn.Recurrent(rooted, 2, 6, dtype=torch.float64), id="own64"),
         pytest.param(lambda: openrnn.Recurrent(rooted, 2, 6), id="own"),
         pytest.param(lambda: openrnn.GRU(2, 6, dtype=torch.float64), id="float64")],
        3,
    ),
)  # fmt: skip
def test_the_header_names_what_is_called(tmp_path, make):
    layer = make().eval()
    native = Native(layer, tmp_path)
    x = torch.randn(T, 1, 2, dtype=native.dtype)
    with torch.no_grad():
        assert torch.equal(native(x), layer(x)[0])
    calls = undefined(native.files[1].read_bytes())
    text = native.files[0].read_text().partition("C library: ")[2].partition(".\n")[0]
    if calls is not None:
        assert sorted(text.split(", ")) == sorted({*calls} - {"sched_yield"})


@needs_cc
def test_parametrizations_are_those_of_eval_mode(tmp_path):
    layer = nn.utils.parametrizations.spectral_norm(openrnn.LSTM(3, 16), "weight_hh_l0").train()
    before = copy.deepcopy(layer.state_dict())
    native = Native(layer, tmp_path)
    assert layer.training
    assert layer.parametrizations.training
    assert all(map(torch.equal, before.values(), layer.state_dict().values()))
    x = torch.randn(T, 1, 3)
    with torch.no_grad():
        assert torch.equal(native(x), layer.eval()(x)[0])


def test_a_default_device_is_not_asked(tmp_path, asked_once):
    with torch.device("meta"):
        assert openrnn.export_native(plain(device="cpu"), tmp_path / "net")


def test_no_address_of_this_process_is_written():
    layer = LAYERS["layers"]()
    made = baked(Problem(layer.spec, torch.float32, "cpu"), 64, layer.weights())
    assert [loop.args.row_function for loop in made.loops] == [0, 0]


@pytest.mark.parametrize("cpu", [None, "x86-64-v2"])
def test_where_no_process_can_be_started_it_says_so(tmp_path, monkeypatch, cpu):
    """And leaves this one as it was: numba here would have to link what is not whole."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(targets, "check", lambda cpu: None)
    for _ in range(2):
        with pytest.raises(openrnn.ExportError, match=r"process"):
            openrnn.export_native(LAYERS["lstm"](), tmp_path / "net", cpu=cpu)
    assert not list(tmp_path.iterdir())


def test_names_that_a_header_may_have():
    assert names.member("h") == "h"
    assert [names.member(name) for name in ("work", "double", "new")] == [
        "work_",
        "double_",
        "new_",
    ]
    spec = openrnn.LSTM(3, 4).spec
    texts = [header.header(name, "a*/b", spec, "float", 8, "cpu", []) for name in ("amp", "AMP")]
    guards = {text.partition("#ifndef ")[2].partition("\n")[0] for text in texts}
    assert len(guards) == 2
    assert "a*/b" not in texts[0]


def test_a_path_names_files(tmp_path):
    for path in (f"{tmp_path}/", "", "."):
        with pytest.raises(ValueError, match="must end with the files' name"):
            openrnn.export_native(LAYERS["lstm"](), path)


def test_a_module_of_torch_is_no_layer(tmp_path):
    with pytest.raises(TypeError, match="needs a layer such as"):
        openrnn.export_native(torch.nn.LSTM(3, 4), tmp_path / "net")


def test_a_cell_that_the_cpu_backend_refuses(tmp_path):
    layer = openrnn.Recurrent(openrnn.cells.gru_reset_before, 3, 4)
    with pytest.raises(openrnn.NoBackendError, match="two dependent products"):
        openrnn.export_native(layer, tmp_path / "net")
