"""Programs in a Python of their own that has torch and nothing of ours: forks save its import.

A fork ends without the end of Python, and variables that are read when torch is imported, such as
OMP_NUM_THREADS, have no effect in one: where either matters, `process` starts a Python.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

# Each line that it reads is a program, which runs in a fork of it as under `python -c`.
SERVER = """
import json, os, signal, sys, torch, traceback
told = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=told, flush=True)
        continue
    for number, name in enumerate((os.devnull, "out", "err")):
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
    os._exit(code)  # Python's own end takes all of torch down, half a second
"""
TIMEOUT = 600  # seconds


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen:
    """One for each worker, until that ends."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def process(program, *args, cwd=".", env=None, timeout=TIMEOUT):
    """What `subprocess.run` says of a program: its exit status, and what it printed."""
    env = dict(os.environ if env is None else env)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], text=True, capture_output=True,
        check=False, timeout=timeout, cwd=cwd, env={**env, "PYTHONPATH": os.pathsep.join(_path())},
    )  # fmt: skip


def python(program, *args, cwd=".", env=None, timeout=TIMEOUT):
    """The same of a fork."""
    if sys.platform != "linux":  # torch on a Mac does not survive a fork
        return process(program, *args, cwd=cwd, env=env, timeout=timeout)
    with TemporaryDirectory() as folder:
        asked = {
            "program": program, "args": [*map(str, args)], "cwd": os.path.abspath(cwd),
            "env": dict(os.environ if env is None else env), "path": _path(), "folder": folder,
            "timeout": timeout,
        }  # fmt: skip
        server = _server()
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(program, timeout, out, err)
    return subprocess.CompletedProcess(program, code, out, err)


def _path():
    return [entry for entry in sys.path if entry]
