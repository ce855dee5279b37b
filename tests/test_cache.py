"""The folder of what is made at run time: damage, other writers, bounds; the compiler beside it."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import openrnn
from openrnn import store
from openrnn.kernels import compile as compiler
from openrnn.kernels import objects

PACKAGE = Path(openrnn.__file__).parent
TINY = """
from openrnn.kernels.memory import int64_at
def seven(at, plus):
    int64_at(at)[0] = {} + plus
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of one's own."""
    place = tmp_path / "kept"
    place.mkdir()
    monkeypatch.setattr(store, "folder", lambda: place)
    return place


class Maker:
    """Makes a content and counts how often."""

    def __init__(self, content=b"content"):
        self.content, self.count = content, 0

    def __call__(self):
        self.count += 1
        return self.content


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def python(program, *args, home=None, **more):
    """What a program prints, in a process of its own."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath}
    if home is not None:
        environment["HOME"] = str(home)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        env=environment, capture_output=True, text=True, check=False, **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def seven(plus=0, value=7):
    """What the kernel of TINY says."""
    out = torch.zeros(1, dtype=torch.int64)
    (kernel,) = objects.kernels(TINY.format(value), ["seven"])
    kernel.ctypes(out.data_ptr(), plus)
    return out.item()


def test_made_once_and_read_again(folder):
    path, make = store.path_of("kind", ("of", b"this")), Maker()
    assert [store.kept(path, make) for _ in range(3)] == [b"content"] * 3
    assert make.count == 1
    assert files(folder) == [path.name]


def test_a_name_is_all_that_it_is_made_of(folder):
    made_of = [("a", "b"), ("a", "c"), ("ab",), ("a", "b", ""), ("b", "a"), ("a", b"b\n")]
    names = {store.path_of(kind, each).name for each in made_of for kind in ("cpu", "cubin")}
    assert len(names) == 2 * len(made_of)


def damages():
    def emptied(path):
        path.write_bytes(b"")

    def truncated(path):
        path.write_bytes(path.read_bytes()[:-1])

    def longer(path):
        path.write_bytes(path.read_bytes() + b"x")

    def flipped(place):
        def flip(path):
            content = bytearray(path.read_bytes())
            content[place] ^= 1
            path.write_bytes(content)

        return flip

    def foreign(path):
        other = store.path_of("kind", ("another",))
        store.kept(other, lambda: b"foreign")
        other.rename(path)

    def a_folder(path):
        path.unlink()
        path.mkdir()
        (path / "inside").write_text("x")

    def a_broken_link(path):
        path.unlink()
        path.symlink_to("nowhere")

    return {
        "emptied": emptied, "truncated": truncated, "longer": longer, "the first byte": flipped(0),
        "the digest": flipped(20), "the content": flipped(-1), "foreign": foreign,
        "a folder": a_folder, "a broken link": a_broken_link,
    }  # fmt: skip


@pytest.mark.parametrize("damage", damages().values(), ids=damages())
def test_what_is_damaged_is_made_again(folder, damage):
    path, make = store.path_of("kind", ("this",)), Maker()
    store.kept(path, make)
    whole = path.read_bytes()
    damage(path)
    assert store.kept(path, make) == b"content"
    assert make.count == 2
    assert path.read_bytes() == whole
    assert store.kept(path, make) == b"content"
    assert make.count == 2
    assert files(folder) == [path.name]


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_what_cannot_be_written_costs_only_time(folder, monkeypatch, call, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, call, refuse)
    make = Maker()
    path = store.path_of("kind", ("this",))
    assert [store.kept(path, make) for _ in range(2)] == [b"content"] * 2
    assert make.count == 2
    assert files(folder) == []


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


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Sets where this user's home and temporary files are."""

    def set_places(home, temporary=tmp_path):
        monkeypatch.setattr(Path, "home", lambda: Path(home))
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        return store.folder.__wrapped__()

    return set_places


def test_the_folder_is_made_for_this_user_alone(tmp_path, places):
    place = places(tmp_path)
    assert place == tmp_path / ".cache" / "openrnn"
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    assert places(tmp_path) == place
    assert place.stat().st_mode & 0o777 == 0o700


def test_no_home(tmp_path, places):
    """Then a folder among the temporary files, and where that is another's, none."""
    (tmp_path / "file").write_text("in place of a folder")
    for home in ("/proc/none", tmp_path / "file"):
        place = places(home)
        assert place.parent == tmp_path
        assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")  # whoever made it may write there
    for temporary in (tmp_path, tmp_path / "file"):
        nowhere = places("/proc/none", temporary)
        assert not nowhere.parent.is_dir()
        assert store.read(nowhere / "x") is None


def test_another_users_folder_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    found = list(store._places())
    found[0].mkdir(parents=True)
    assert store._is_ours(found[0])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not store._is_ours(found[0])


def test_a_kernel_without_a_place_to_write(monkeypatch):
    monkeypatch.setattr(store, "folder", lambda: Path(os.devnull) / "openrnn")
    assert seven(1) == 8


NEW_CELL = """
import os, random, sys
import torch, openrnn
from openrnn import store
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


def test_a_layer_where_nothing_can_be_written():
    """Neither the cache nor the package; nothing appears beside the package's sources."""
    before = {path for path in PACKAGE.rglob("*") if path.suffix != ".pyc"}
    program = """
places = os.path.dirname(openrnn.__file__), str(store.folder())
def audit(event, args):
    if event == "open" and str(args[0]).startswith(places) and args[2] & (os.O_WRONLY | os.O_RDWR):
        raise OSError(30, "Read-only file system", args[0])
sys.addaudithook(audit)
call(mine)
"""
    python(NEW_CELL + program, home=Path.home())
    assert {path for path in PACKAGE.rglob("*") if path.suffix != ".pyc"} == before


def test_a_changed_kernel_is_another_entry(folder, tmp_path, monkeypatch):
    """An edit of any building block, another processor, another version of a compiler."""
    names = {objects.path_of("source", ["name"]).name}

    def renewed():
        objects._made_of.cache_clear()
        names.add(objects.path_of("source", ["name"]).name)

    copy = tmp_path / "kernels"
    copy.mkdir()
    for path in (PACKAGE / "kernels").glob("*.py"):
        (copy / path.name).write_bytes(path.read_bytes())
    (tmp_path / "rounds.py").write_bytes((PACKAGE / "rounds.py").read_bytes())
    places = {"openrnn.kernels": copy, "openrnn": tmp_path}
    monkeypatch.setattr(objects, "files", places.get)
    renewed()
    assert len(names) == 1
    for name in ("kernels/vectors.py", "kernels/rows.py", "rounds.py"):
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


def test_the_oldest_by_last_use_go_first(folder, monkeypatch):
    size = 1000
    monkeypatch.setattr(store, "BOUND", 5 * size)
    monkeypatch.setattr(store, "ROOM", size)
    make, now = Maker(b"x" * (size - 100)), time.time()
    paths = [store.path_of("kind", (str(each),)) for each in range(5)]
    for age, path in enumerate(paths):
        store.kept(path, make)
        os.utime(path, (now - 100 + age, now - 100 + age))
    assert store.read(paths[0])  # the newest now
    (folder / "__pycache__").mkdir()
    left = folder / "__pycache__" / "of an earlier version.nbi"
    left.write_bytes(b"x" * size)
    os.utime(left, (now - 1000, now - 1000))
    algorithms = folder / "cudnn_algorithms.json"
    algorithms.write_text("{}")
    os.utime(algorithms, (now - 1000, now - 1000))
    last = store.path_of("kind", ("last",))
    store.kept(last, make)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4 * size
    assert all(path.exists() for path in (paths[0], paths[4], last, algorithms))
    assert not any(path.exists() for path in (left, paths[1], paths[2]))


def test_litter_of_processes_that_were_killed_goes(folder):
    old, new = folder / "a.cpu.1-1.tmp", folder / "b.cpu.lock"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (time.time() - 2 * store.STALE,) * 2)
    store.kept(store.path_of("kind", ("this",)), Maker())
    assert not old.exists()
    assert new.exists()


def test_whoever_makes_an_entry_is_waited_for(folder):
    """Threads here; each opens the lock for itself, as processes do."""
    path, make = store.path_of("kind", ("this",)), Maker()

    def slowly():
        time.sleep(0.3)
        return make()

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(store.kept(path, slowly))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"content"] * 8
    assert make.count == 1
    assert files(folder) == [path.name]


def test_nobody_waits_for_ever(folder, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE", 0.1)
    path, make = store.path_of("kind", ("this",)), Maker()
    held = store._lock(path.with_name(f"{path.name}.lock"))
    assert store.kept(path, make) == b"content"
    os.close(held)


def test_without_locks(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    make = Maker()
    assert store.kept(store.path_of("kind", ("this",)), make) == b"content"


def test_a_failed_compilation_lets_the_next_one_try(folder):
    path = store.path_of("kind", ("this",))

    def fail():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            store.kept(path, fail)
    assert store.kept(path, Maker()) == b"content"
    assert files(folder) == [path.name]


def _ask(place, results):
    store.folder = lambda: Path(place)
    started, run = [], subprocess.run

    def counted(*args, **more):
        started.append(1)
        return run(*args, **more)

    objects.subprocess.run = counted
    results.put((seven(), len(started)))


def test_processes_compile_once(folder):
    """Daemons, too, which may have no children of `multiprocessing`."""
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_ask, args=(str(folder), results), daemon=True) for _ in range(8)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [value for value, _ in found] == [7] * 8
    assert sum(started for _, started in found) == 1


@pytest.mark.parametrize("executable", ["", None, "/usr/bin/blender", "/nowhere/python3"])
def test_where_no_process_can_be_started(folder, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert seven(1) == 8


def test_a_compiler_that_fails_beside_is_asked_here(folder, monkeypatch):
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
before = resident()
call(mine)
print((resident() - before) >> 20, "numba" in sys.modules)
"""
    grown, numba = python(NEW_CELL + program, home=Path.home()).split()
    assert int(grown) < 25
    assert numba == "False"
