"""CPU kernels compiled in another process, kept and loaded: damage, full disks, memory."""

import os
import platform
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch

import openrnn
from openrnn import store
from openrnn.codegen import build
from openrnn.kernels.cpu import compile as compiler
from openrnn.kernels.cpu import loops, objects

PACKAGE = Path(openrnn.__file__).parent
TINY = """
from openrnn.kernels.cpu.memory import int64_at
def seven(at, plus):
    int64_at(at)[0] = {} + plus
"""


LOOP = """
from openrnn.kernels.cpu.elementwise import sigmoid_float32 as sigmoid
from openrnn.kernels.cpu.memory import float32_at
def sigmoids(at, out, count):
    x, y = float32_at(at), float32_at(out)
    for k in range(count):
        y[k] = sigmoid(x[k])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of one's own."""
    place = tmp_path / "kept"
    place.mkdir()
    monkeypatch.setattr(store, "folder", lambda: place)
    return place


@pytest.fixture
def processes(monkeypatch):
    """Compilers are processes as users have them, not forks."""
    monkeypatch.setattr(objects, "subprocess", subprocess)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def python(program, home):
    """What a program prints, in a process of its own."""
    done = forks.python(program, env={"PATH": os.defpath, "HOME": str(home)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def seven(plus=0, value=7):
    """What the kernel of TINY says."""
    out = torch.zeros(1, dtype=torch.int64)
    (kernel,) = objects.kernels(TINY.format(value), ["seven"])
    kernel.ctypes(out.data_ptr(), plus)
    return out.item()


def test_damaged_machine_code_is_never_run(folder):
    assert seven() == 7
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for place in (len(whole) // 2, len(whole) - 40):
        content = bytearray(whole)
        content[place] ^= 0xFF
        path.write_bytes(content)
        assert seven(3) == 10
        assert path.read_bytes() == whole


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root mounts a small disk"
)
def test_a_full_disk(tmp_path):
    """A kernel compiles and runs, and nothing half-written is left."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(tmp_path)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip("this system mounts no tmpfs")
    try:
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "filler").write_bytes(b"x" * (1 << 20))
        before = files(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "folder", lambda: tmp_path)
            assert seven() == 7
        assert files(tmp_path) == before
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_kernel_without_a_place_to_write(monkeypatch):
    monkeypatch.setattr(store, "folder", lambda: Path(os.devnull) / "openrnn")
    assert seven(1) == 8


NEW_CELL = """
import os, random, sys
import torch, openrnn
from openrnn import store
from openrnn.codegen import build
slope = random.random()
@openrnn.cell(gates="a", states="h")
def mine(x, r, s):
    return torch.tanh(x.a + slope * r.a)
def call(cell):
    torch.manual_seed(0)
    layers = [openrnn.Recurrent(cell, 3, 4, backend=name) for name in ("cpu", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    x, found = torch.randn(2, 1, 3), []
    for layer in layers:
        y = layer(x)[0]
        found.append((y, *torch.autograd.grad(y.sum(), layer.parameters())))
    torch.testing.assert_close(*found)
"""


def written():
    """What is there beside Python's own files."""
    return {path for path in PACKAGE.rglob("*") if path.is_file() and ".pyc" not in path.name}


def test_a_layer_where_nothing_can_be_written():
    """Neither the cache nor the package; nothing appears beside the package's sources."""
    before = written()
    program = """
places = os.path.dirname(openrnn.__file__), str(store.folder())
def audit(event, args):
    if event == "open" and str(args[0]).startswith(places) and args[2] & (os.O_WRONLY | os.O_RDWR):
        raise OSError(30, "Read-only file system", args[0])
sys.addaudithook(audit)
call(mine)
"""
    python(NEW_CELL + program, home=Path.home())
    assert written() == before


def test_a_changed_kernel_is_another_entry(folder, tmp_path, monkeypatch):
    """An edit of any building block, another processor, another version of a compiler."""
    names = {objects.path_of("source", ["name"]).name}

    def renewed():
        objects._made_of.cache_clear()
        names.add(objects.path_of("source", ["name"]).name)

    copy = tmp_path / "cpu"
    copy.mkdir()
    for path in (PACKAGE / "kernels" / "cpu").glob("*.py"):
        (copy / path.name).write_bytes(path.read_bytes())
    (tmp_path / "rounds.py").write_bytes((PACKAGE / "rounds.py").read_bytes())
    places = {"openrnn.kernels.cpu": copy, "openrnn": tmp_path}
    monkeypatch.setattr(store, "files", places.get)
    renewed()
    assert len(names) == 1
    for name in ("cpu/vectors.py", "cpu/rows.py", "rounds.py"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        renewed()
    monkeypatch.setattr(objects.host, "FEATURES", "+sse2")
    renewed()
    monkeypatch.setattr(objects.host, "NAME", "generic")
    renewed()
    monkeypatch.setattr(objects, "version", lambda package: "0")
    renewed()
    names.add(objects.path_of("other source", ["name"]).name)
    names.add(objects.path_of("source", ["other name"]).name)
    assert len(names) == 9
    objects._made_of.cache_clear()


def _ask(place, results):
    store.folder = lambda: Path(place)
    started, run = [], subprocess.run

    def counted(*args, **more):
        started.append(1)
        return run(*args, **more)

    objects.subprocess.run = counted
    results.put((seven(), len(started)))


def test_processes_compile_once(folder, processes):
    """Daemons, too, which may have no children of `multiprocessing`."""
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    results = context.Queue()
    started = [
        context.Process(target=_ask, args=(str(folder), results), daemon=True) for _ in range(8)
    ]
    for process in started:
        process.start()
    found = [results.get(timeout=120) for _ in started]
    for process in started:
        process.join()
    assert [value for value, _ in found] == [7] * 8
    assert sum(started for _, started in found) == 1


@pytest.mark.parametrize("executable", ["", None, "/usr/bin/blender", "/nowhere/python3"])
def test_where_no_process_can_be_started(folder, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert seven(1) == 8


def test_a_path_object_on_the_path_is_ignored(folder, monkeypatch, processes):
    monkeypatch.setattr(sys, "path", [*sys.path, folder])
    assert seven(1) == 8


def test_a_fork_compiles_what_a_process_does(monkeypatch, processes):
    """Other tests have forks."""
    found = objects._compile(TINY.format(7), ["seven"])
    monkeypatch.setattr(objects, "subprocess", forks.compilers())
    monkeypatch.setattr(compiler, "object_of", lambda *_: pytest.fail("compiled here"))
    assert objects._compile(TINY.format(7), ["seven"]) == found


def test_where_no_thread_can_be_started(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(loops, "loop", lambda *asked: asked)
    monkeypatch.setattr(build, "_rows", lambda *_: [SimpleNamespace(address=n) for n in (1, 2)])
    assert build._together("forward", None, "float32") == (("forward", "float32"), 1)
    assert build._together("backward", None, "float64") == (("backward", "float64"), 2)


def test_a_compiler_that_fails_beside_is_asked_here(folder, monkeypatch, processes):
    monkeypatch.setattr(objects, "_BEGIN", "import sys; print('noise'); sys.exit(3)")
    assert seven(1) == 8


def test_code_that_calls_what_is_not_here_is_refused(folder):
    head, _, body = compiler.object_of(TINY.format(7), ["seven"]).partition(b"\n")
    with pytest.raises(objects.LoadError, match="calls nothing_of_the_kind, unknown"):
        objects.load(
            head.replace(b'"calls": []', b'"calls": ["nothing_of_the_kind"]') + b"\n" + body
        )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_compiled_cell_takes_little_memory():
    """The compiler's hundred megabytes a kernel end with its process; numba is not even here."""
    program = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
call(openrnn.cells.rnn_tanh)
from openrnn.codegen.trace import trace  # for its first trace torch imports its compiler
trace(openrnn.cell(gates="a", states="h", name="other")(lambda x, r, s: x.a + r.a))
before = resident()
call(mine)
print((resident() - before) >> 20, "numba" in sys.modules)
"""
    grown, numba = python(NEW_CELL + program, home=Path.home()).split()
    assert int(grown) < 25, grown
    assert numba == "False"


def divisions(code):
    """The bytes of the vectors that vdivps with an EVEX prefix takes, wherever it may stand."""
    four = zip(*(code[place:] for place in (0, 1, 2, 3, 4)), strict=False)
    return {
        16 << (c >> 5 & 3)
        for evex, a, b, c, opcode in four
        if evex == 0x62 and a & 15 == 1 and b & 0x87 == 4 and c & 0x10 == 0 and opcode == 0x5E
    }


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="x86 processors have AVX-512"
)
@pytest.mark.parametrize("cpu", ["sapphirerapids", "skylake-avx512", "znver4"])
def test_with_avx_512_loops_use_whole_vectors(monkeypatch, processes, cpu):
    """For Intel's processors LLVM prefers halves."""
    told = objects.llvm.get_host_cpu_features()
    avx512 = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")
    told |= dict.fromkeys(avx512, True)
    features = objects.host.in_whole_vectors(told.flatten())
    assert objects.host.in_whole_vectors(features) == features
    assert objects.host.in_whole_vectors("+avx2,-avx512f") == "+avx2,-avx512f"
    monkeypatch.setattr(objects.host, "FEATURES", features)
    monkeypatch.setattr(objects.host, "NAME", cpu)
    code = objects._in_a_process({"source": LOOP, "names": ["sigmoids"]})
    assert divisions(code) - {16} == {64}  # what is left of a loop may take less


def test_an_interrupt_waits_for_no_compiler():
    """What compiles beside the main thread is no thread that the end of a process waits for."""
    ready = threading.Event()
    made = build._elsewhere(lambda: ready.wait(600) and 7)
    (thread,) = (one for one in threading.enumerate() if one.name == "openrnn-compiler")
    assert thread.daemon
    ready.set()
    assert made() == 7

    def fails():
        raise LookupError("no compiler")

    with pytest.raises(LookupError, match="no compiler"):
        build._elsewhere(fails)()


def test_without_threads_it_is_made_here(monkeypatch):
    monkeypatch.setattr(build.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError))
    assert build._elsewhere(threading.get_ident)() == threading.get_ident()
