"""Runs an example with the packages that it needs, or all that this machine can run.

    python examples/run.py recurrent_ppo --updates 2  # make example NAME=recurrent_ppo
    python examples/run.py                            # make examples

An example `NAME.py` may have `requirements/NAME.txt`: every package that it needs beyond openrnn's
own, with those that these need, pinned. They are installed into `.venv-examples/NAME`, which sees
the packages of the Python that runs this, torch among them, and never gets a torch of its own.
"""

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACE = HERE.parent / ".venv-examples"
HELPERS = {"compare", "converted", "run"}


def names() -> list[str]:
    """All examples."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in HELPERS)


def python_for(name: str, requirements: Path = HERE / "requirements", place: Path = PLACE) -> str:
    """The Python that has an example's packages, which are installed if they are not there.

    Raises:
        RuntimeError: they cannot be installed, in pip's words.
    """
    wanted = requirements / f"{name}.txt"
    if not wanted.exists():
        return sys.executable
    folder = place / name
    python, done = folder / "bin" / "python", folder / "installed.txt"
    below = sysconfig.get_path("purelib")
    asked = f"# {sys.version}, {below}\n{wanted.read_text()}"
    if done.exists() and done.read_text() == asked:
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    # --no-deps: what is not listed is not installed, another torch least of all
    pip = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "1",
         "--disable-pip-version-check", "-r", wanted],
        check=False, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if pip.returncode:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError(errors[-1].removeprefix("ERROR: ") if errors else pip.stderr.strip())
    done.write_text(asked)
    return str(python)


def run_all() -> bool:
    """Runs every example; prints what became of each, and returns whether none failed."""
    rows = []
    for name in names():
        print(f"\n== {name}", flush=True)
        try:
            python = python_for(name)
        except RuntimeError as error:
            rows.append((name, f"skipped: its packages cannot be installed: {error}"))
            continue
        begin = time.perf_counter()
        status = subprocess.run([python, HERE / f"{name}.py"], check=False).returncode
        taken = f"{time.perf_counter() - begin:.0f} s"
        rows.append((name, f"failed with status {status}" if status else f"ran, {taken}"))
    print()
    for name, note in rows:
        print(f"{name:<{max(map(len, names()))}}  {note}")
    return not any(note.startswith("failed") for _, note in rows)


def main(arguments: list[str]) -> int:
    """Runs what is asked for; returns the exit status."""
    if not arguments:
        return 0 if run_all() else 1
    name, *options = arguments
    if name not in names():
        print(f"no example {name!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    try:
        python = python_for(name)
    except RuntimeError as error:
        print(f"the packages of {name} cannot be installed: {error}", file=sys.stderr)
        return 1
    return subprocess.run([python, HERE / f"{name}.py", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
