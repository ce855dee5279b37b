"""Programs in forks end, and are heard, as those that Python runs."""

import subprocess

import forks
import pytest


@pytest.mark.parametrize(
    ("ends", "code", "err"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a text')", 1, "a text\n"),
        ("assert False, 'why'", 1, "AssertionError: why\n"),
    ],
)
def test_how_a_program_ends(ends, code, err):
    done = forks.python(f"import sys; print(sys.argv); {ends}", "word", 7)
    assert done.returncode == code
    assert done.stdout == "['-c', 'word', '7']\n"
    assert done.stderr.endswith(err) if err else not done.stderr


@pytest.mark.parametrize("ends", [False, True])
def test_the_end_of_python_comes_where_it_is_asked_for(ends):
    program = "import atexit; atexit.register(print, 'over'); raise SystemExit(3)"
    done = forks.python(program, ends=ends)
    assert (done.returncode, done.stdout, done.stderr) == (3, "over\n" * ends, "")


def test_a_program_that_does_not_end():
    with pytest.raises(subprocess.TimeoutExpired):
        forks.python("import time; time.sleep(600)", timeout=1)
    assert forks.python("print(1)").stdout == "1\n"  # the next one runs
