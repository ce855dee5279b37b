"""Programs in a Python of their own that has torch and nothing of ours: forks save its import.

It has torch's compiler as well: the first call of a layer imports that, in more than a second.

A fork ends without the end of Python, unless it is asked to. Variables that are read when torch is
imported, such as OMP_NUM_THREADS, have no effect in one: where they matter, `process` starts a
Python.

Processes that compile kernels of the CPU are forks as well, of a Python that has numba.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import SimpleNamespace

# Each line that it reads is a program, which runs in a fork of it as under `python -c`.
SERVER = """
import gc, json, os, signal, sys, traceback
gc.freeze()  # what is here now is no work for the collectors of forks
told = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=told, flush=True)
        continue
    for number, name in enumerate(("in", "out", "err")):
        opened = os.open(os.path.join(asked["folder"], name), os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    told.close()
    sys.stdin = open(0, closefd=False)
    signal.alarm(asked["timeout"])
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:] = ["", *asked["path"]]
    sys.argv = ["-c", *asked["args"]]
    code = 0
    try:
        exec(compile(asked["program"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if asked["ends"]:
        sys.exit(code)
    os._exit(code)  # Python's own end takes all of torch down, half a second
"""
TIMEOUT = 600  # seconds
# what numba knows of types and functions, as it is before it compiles anything
NUMBA = """
from numba.core import compiler, dispatcher, registry
registry.cpu_target.typing_context.refresh()
registry.cpu_target.target_context.refresh()
"""
_PYTHON = sys.executable  # tests say that there is none
_one = Lock()  # program at a time: kernels are compiled by several threads
_ours = os.getpid()  # the pipes to a server are no fork's of this process


@cache
def _server(first: str, *options: str) -> subprocess.Popen:
    """One for each worker and what it runs first, until that ends."""
    server = subprocess.Popen(
        [_PYTHON, *options, "-c", first + SERVER], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _forked(server, program, args=(), given=b"", **asked):
    """The exit status of a program in a fork of a server, and what it printed."""
    with TemporaryDirectory() as folder:
        Path(folder, "in").write_bytes(given)
        asked |= {"program": program, "args": [*map(str, args)], "folder": folder}
        with _one:
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        out, err = (Path(folder, name).read_bytes() for name in ("out", "err"))
    return code, out, err


def process(program, *args, cwd=".", env=None, timeout=TIMEOUT):
    """What `subprocess.run` says of a program: its exit status, and what it printed."""
    env = dict(os.environ if env is None else env)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], text=True, capture_output=True,
        check=False, timeout=timeout, cwd=cwd, env={**env, "PYTHONPATH": os.pathsep.join(_path())},
    )  # fmt: skip


def python(program, *args, cwd=".", env=None, timeout=TIMEOUT, ends=False):
    """The same of a fork, which `ends` as Python does or at once."""
    if sys.platform != "linux":  # torch on a Mac does not survive a fork
        return process(program, *args, cwd=cwd, env=env, timeout=timeout)
    code, out, err = _forked(
        _server("import torch._dynamo"), program, args, cwd=os.path.abspath(cwd), path=_path(),
        env=dict(os.environ if env is None else env), timeout=timeout, ends=ends,
    )  # fmt: skip
    out, err = out.decode(), err.decode()
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(program, timeout, out, err)
    return subprocess.CompletedProcess(program, code, out, err)


def _run(command, *, input, capture_output, check):
    """As `subprocess.run` of a Python that compiles, in a fork that need not import numba."""
    python, *options, program = command
    if python != _PYTHON or options != ["-I", "-c"] or os.getpid() != _ours:
        return subprocess.run(command, input=input, capture_output=capture_output, check=check)
    server = _server(NUMBA, "-I")
    code, out, err = _forked(
        server,
        program,
        given=input,
        cwd=os.getcwd(),
        path=[],
        env=dict(os.environ),
        timeout=TIMEOUT,
        ends=False,
    )
    return subprocess.CompletedProcess(command, code, out, err)


def compilers():
    """What stands for `subprocess` where kernels are compiled."""
    return SimpleNamespace(run=_run) if sys.platform == "linux" else subprocess


def _path():
    return [entry for entry in sys.path if entry]
