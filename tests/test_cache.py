"""The folder of what is made at run time: damage, other writers, full disks, bounds."""

import errno
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import openrnn
from openrnn import store

PACKAGE = Path(openrnn.__file__).parent


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_what_cannot_be_written_costs_time_and_is_said_once(
    folder, monkeypatch, caplog, call, code
):
    monkeypatch.setattr(store, "_told", False)
    codes = iter([code, errno.EACCES, code])  # other reasons later are not said

    def refuse(*_):
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, call, refuse)
    make = Maker()
    path = store.path_of("kind", ("this",))
    assert [store.kept(path, make) for _ in range(3)] == [b"content"] * 3
    assert make.count == 3
    assert files(folder) == []
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"cannot be kept in {folder} ({os.strerror(code)})" in said


def test_a_line_of_progress_promises_no_folder_that_is_not_there(tmp_path, caplog):
    caplog.set_level("INFO", "openrnn")
    store.kept(tmp_path / "none" / "x", Maker(), "a cell")
    assert caplog.messages[0] == "compiling a cell"
    store.kept(tmp_path / "x", Maker(), "a cell")
    assert caplog.messages[-1] == f"compiling a cell, once: it is kept in {tmp_path}"


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
    found = list(store._candidates())
    found[0].mkdir(parents=True)
    assert store._is_ours(found[0])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not store._is_ours(found[0])


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
    monkeypatch.setattr(store, "WAIT", 0.1)
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
