"""Installs what `make release` built, each file in a fresh environment, and tries it there.

Run from the root of the source tree: python .ci/try_release.py dist
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

MOST = 1_000_000  # bytes of a file
NEEDED = (
    "openrnn/__init__.py",
    "openrnn/py.typed",
    "openrnn/kernels/cuda/forward.cuh",
    "openrnn/tuning/measured.csv",
    "openrnn_command/app.py",
)
TRIAL = """
import sys, pathlib, torch, openrnn
assert pathlib.Path(openrnn.__file__).is_relative_to(sys.prefix), openrnn.__file__
lstm = openrnn.LSTM(3, 4)
y, (h, c) = lstm(torch.randn(5, 2, 3), lengths=torch.tensor([5, 2]))
y.sum().backward()
theirs = torch.nn.LSTM(3, 4)
theirs.load_state_dict(lstm.state_dict())
x = torch.randn(5, 2, 3)
torch.testing.assert_close(lstm(x)[0], theirs(x)[0])
assert openrnn.explain(lstm, quiet=True).chosen == "cpu" or torch.cuda.is_available()
print(openrnn.__version__)
"""


def main(folder: Path) -> None:
    """Checks both files, then tries both."""
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    for path in (wheel, sdist):
        size = path.stat().st_size
        print(f"{path.name}: {size / 1000:.0f} kB")
        _need(size < MOST, f"{path.name} has {size} bytes, more than {MOST}")
    version = _check_contents(wheel, sdist)
    for path in (wheel, sdist):
        with tempfile.TemporaryDirectory() as place:
            _try(path.resolve(), Path(place), version)
        print(f"{path.name}: installed and tried in a fresh environment")


def _check_contents(wheel: Path, sdist: Path) -> str:
    """The version that the wheel has; all files that it needs are in it, and none of its own."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(file.read(about).decode())
    for name in NEEDED:
        _need(name in names, f"{wheel.name} lacks {name}")
    tops = {name.partition("/")[0] for name in names} - {about.partition("/")[0]}
    _need(tops == {"openrnn", "openrnn_command"}, f"{wheel.name} has {sorted(tops)} at its top")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    lacking = [name for name in names if name.startswith("openrnn") and ".dist-info" not in name]
    lacking = [name for name in lacking if f"src/{name}" not in inside]
    _need(not lacking, f"{sdist.name} lacks {lacking}")
    text = str(metadata.get_payload())
    _need("'.[" not in text and "](docs/" not in text, "the long description has local links")
    return str(metadata["Version"])


def _try(path: Path, place: Path, version: str) -> None:
    """Installs a file beside a pinned torch, and runs a layer and the command."""
    venv.create(place / "venv", with_pip=True)
    python = str(place / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    pinned = ["-c", str(Path("constraints.txt").resolve())]
    _run(python, "-m", "pip", "install", "-q", "--no-compile", *pinned, "torch", at=place)
    _run(python, "-m", "pip", "install", "-q", "--no-compile", *pinned, str(path), at=place)
    _run(python, "-m", "pip", "check", at=place)
    said = _run(python, "-c", TRIAL, at=place)
    _need(said.split()[-1] == version, f"openrnn {said} is not {version}")
    said = _run(python, "-m", "openrnn", "--version", at=place)
    _need(said == f"openrnn {version}", f"the command says {said}")
    command = Path(python).with_name("openrnn")
    _need(_run(str(command), "--version", at=place) == said, "there are two commands")
    _need("backend cpu" in _run(str(command), "info", at=place), "openrnn info lacks a backend")


def _run(*command: str, at: Path) -> str:
    # without PYTHONPATH and the like, by which the sources would be tried in place of the files
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=at, stdout=subprocess.PIPE, text=True, check=True, env=clean)
    return done.stdout.strip()


def _need(true: bool, otherwise: str) -> None:
    if not true:
        sys.exit(f"release: {otherwise}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
