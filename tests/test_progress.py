"""A first compilation says on a terminal what it does; elsewhere it is quiet."""

import io
import logging
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from openrnn import progress, store


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    there = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=there))
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    monkeypatch.setattr(progress, "_TELLER", progress.Teller())
    return there


def until_said(terminal):
    end = time.monotonic() + 60
    while not terminal.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return terminal.getvalue()


def test_what_takes_long_is_told_once(terminal):
    with progress.told("compiling lstm"):
        assert until_said(terminal) == "openrnn: compiling lstm\n"
        time.sleep(0.3)
    assert terminal.getvalue() == "openrnn: compiling lstm\n"


def test_what_is_quick_is_not_told(terminal, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.told("compiling lstm"):
        pass
    assert terminal.getvalue() == ""


def test_many_quick_ones_are_told_together(terminal):
    """CUDA kernels take a second each; a call may want twenty."""
    for number in range(10_000):
        with progress.told(f"compiling {number}"):
            time.sleep(0.02)
        if terminal.getvalue():
            break
    assert terminal.getvalue().startswith("openrnn: compiling ")


def test_two_at_once_have_a_line_each(terminal):
    with progress.told("compiling lstm"), progress.told("compiling loops"):
        until_said(terminal)
    assert terminal.getvalue() == "openrnn: compiling lstm\nopenrnn: compiling loops\n"


def test_no_terminal_no_line_but_a_log(monkeypatch, caplog):
    quiet = SimpleNamespace(stderr=io.StringIO())
    monkeypatch.setattr(progress, "sys", quiet)
    monkeypatch.setattr(progress._TELLER, "begin", lambda _: pytest.fail("it tells"))
    with caplog.at_level(logging.INFO, "openrnn"), progress.told("compiling lstm"):
        pass
    assert caplog.messages == ["compiling lstm"]
    assert quiet.stderr.getvalue() == ""
    quiet.stderr = None  # as in a program without a console
    with progress.told("compiling lstm"):
        pass


def test_the_cache_tells_what_it_makes_and_who(tmp_path, monkeypatch, caplog):
    jobs, told = [], progress.told

    def kept_in_mind(doing):
        job = told(doing)
        jobs.append(doing)
        return job

    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    monkeypatch.setattr(store, "told", kept_in_mind)
    path = store.path_of("kind", ("this",))
    assert store.kept(path, lambda: b"1", "cell lstm for float32") == b"1"
    assert jobs == [f"compiling cell lstm for float32, once: it is kept in {tmp_path}"]
    assert store.kept(path, lambda: b"2", "cell lstm for float32") == b"1"
    assert len(jobs) == 1  # what is there is not told


def test_who_waits_for_another_process_says_so(terminal, tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    path = store.path_of("kind", ("this",))
    program = (
        "import fcntl, os, sys; lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600); "
        "fcntl.flock(lock, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, f"{path}.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        monkeypatch.setattr(store, "WAIT", 1.0)
        store.kept(path, lambda: b"1", "cell lstm for float32")
        other.stdin.close()
    said = "another process compiles cell lstm for float32, once"
    assert said in terminal.getvalue()
