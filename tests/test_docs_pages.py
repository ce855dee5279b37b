"""Every block of code of the pages runs, and commands are such as `openrnn` takes."""

import doctest
import re
import runpy
import shlex
from argparse import ArgumentParser
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from openrnn import cells, cli
from openrnn.bench.cases import select
from openrnn.bench.suites import rows_of

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "install", "ten_minutes", "choose", "coming_from", "convert", "faq", "onnx", "transforms",
)  # fmt: skip
TUTORIALS = sorted(path.stem for path in (DOCS / "tutorials").glob("*.py"))
QUICK = ("from_keras",)
FENCE = re.compile(r"^(?:<!-- not run: .* -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\bopenrnn(?:\.\w+)+")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text, languages):
    """The blocks of these languages: line, code, and whether they are to run."""
    for found in FENCE.finditer(text):
        if found[1] in languages:
            line = text.count("\n", 0, found.start(2))
            yield line, found[2], not found[0].startswith("<!--")


def run(page, text, names):
    """Runs a page's blocks of Python from top to bottom, in one namespace."""
    for line, code, runs in blocks(text, ("python", "pycon")):
        if ">>>" not in code:
            compiled = compile("\n" * line + code, page, "exec")
            if runs:
                exec(compiled, names)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, page, page, line)
        said = []
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append, clear_globs=False)
        assert not said, "".join(said)
        names.update(test.globs)


def commands(text):
    """The words of each command line of ours, without comments."""
    for _, code, _ in blocks(text, ("console", "sh", "shell", "text")):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["openrnn"] and len(words) > 1:
                yield words[1:]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("default")
def test_a_page_runs(page, one_thread, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # other pages define cells of the same names, which explain would tell apart
    for key, cell in [*cells._CELLS.items()]:
        if not str(cell.function.__module__).startswith("openrnn."):
            monkeypatch.delitem(cells._CELLS, key)
    torch.manual_seed(0)
    if page == "onnx":
        pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    run(page, (DOCS / f"{page}.md").read_text(encoding="utf-8"), {})


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TUTORIALS],
)
@pytest.mark.filterwarnings("default")
def test_a_tutorial_runs(name, one_thread, tmp_path, monkeypatch):
    """They compare what they say themselves."""
    plots = pytest.importorskip("matplotlib.pyplot")
    plots.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(DOCS / "tutorials" / f"{name}.py"), run_name="__main__")
    plots.close("all")


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_ours(page, capsys):
    for words in commands((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        assert known(words), f"{shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES)
def test_names_of_a_page_exist(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert not [name for name in NAME.findall(text) if not exists(name)]


def exists(name):
    """Whether a dotted name leads to something, modules that nobody imported yet among them."""
    try:
        resolve_name(name)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


def known(words):
    """Whether there is this command with these options, and such rows; runs nothing."""
    if cli.main([*words, "--help"]):
        return False
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--suite", default="users")
    parser.add_argument("--rows", action="append", default=[])
    asked = parser.parse_known_args(words)[0]
    return words[0] != "bench" or bool(select(rows_of(asked.suite), asked.rows))


# and the tests themselves, on planted faults


@pytest.mark.parametrize(
    "text",
    ["```python\n1 / 0\n```", "```python\n>>> 1 + 1\n3\n```",
     "<!-- not run: why -->\n```python\n1 +\n```"],
)  # fmt: skip
def test_a_wrong_block_is_seen(text):
    with pytest.raises((ZeroDivisionError, AssertionError, SyntaxError)):
        run("page", text, {})


def test_a_name_that_is_nowhere_is_seen():
    assert NAME.findall("`openrnn.cells.gru.spec(8)`, openrnn.gru.") == [
        "openrnn.cells.gru.spec", "openrnn.gru"
    ]  # fmt: skip
    assert exists("openrnn.cells.gru.spec")
    assert not exists("openrnn.gru")


def test_blocks_share_names_and_some_are_not_run():
    names = {}
    run("page", "```python\na = 1\n```\n```python\n>>> b = a + 1\n```\n", names)
    run("page", "<!-- not run: why -->\n```python\na = 1 / 0\n```\n", names)
    assert (names["a"], names["b"]) == (1, 2)


@pytest.mark.parametrize("line", ["openrnn explian --cell gru", "$ openrnn explain --cel gru"])
def test_a_wrong_command_is_seen(line):
    [words] = commands(f"```console\n{line}\n```")
    assert not known(words)


def test_a_row_that_is_nowhere_is_seen():
    with pytest.raises(ValueError, match="no row matches"):
        known(["bench", "--suite", "latency", "--rows", "lstm-*"])
