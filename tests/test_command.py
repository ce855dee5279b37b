"""The help of `openrnn`: without torch, true of the package, and in plain words."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields

import forks
import pytest
import typer

import openrnn
import openrnn_command
from openrnn.bench.command import SUITE_NAMES
from openrnn.bench.engines import PEERS
from openrnn.bench.options import Options
from openrnn.bench.soak import Soak
from openrnn.convert.libraries import LIBRARIES
from openrnn.dispatch import BACKENDS
from openrnn.lm.config import MINUTES, WORDS, Config
from openrnn.lm.job import OUT
from openrnn.lm.tasks import TASKS
from openrnn.tune import command as tuning
from openrnn_command import app, bench, lm, options, tune
from openrnn_command import inspect as looking

COMMANDS = {
    "info": looking.info, "explain": looking.explain, "convert": looking.convert,
    "bench": bench.bench, "soak": bench.soak, "train": lm.train, "sample": lm.sample,
    "tune kernels": tune.kernels, "tune table": tune.table, "tune regions": tune.regions,
}  # fmt: skip


def listed(text):
    """The names in `a, b or c`."""
    return [word for word in re.split(r", or |, | or ", text) if word]


def helped(function):
    """The help texts of a command's options, by their names in Python."""
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: one.annotation.__metadata__[0].help for name, one in parameters.items()}


def default_in(text):
    found = re.search(r" \[default: (.*)\]$", text)
    return found and found[1]


@pytest.mark.parametrize("words", ["--version", "--help", "bench --help", "tune --help", ""])
def test_help_needs_no_torch(words):
    program = (
        "import sys, openrnn_command; code = openrnn_command.main(sys.argv[1:]); "
        "print({'torch', 'openrnn', 'numpy'} & {*sys.modules}, code)"
    )
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert last == f"set() {0 if words else 2}"
    assert lines


def test_version(capsys):
    assert openrnn_command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"openrnn {openrnn.__version__}\n"


def test_a_wrong_option_needs_no_torch_either(capsys):
    assert openrnn_command.main(["bench", "--rwos"]) == 2
    assert capsys.readouterr().err.startswith("openrnn: No such option: --rwos")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nope", "No such command 'nope'; see openrnn --help"),
        ("tune nope", "No such command 'nope'; see openrnn tune --help"),
        ("convert", "Missing argument 'IN'; see openrnn convert --help"),
        ("explain --hidden many", ", got 'many'; see openrnn explain --help"),
    ],
)
def test_a_wrong_word_is_named_and_leads_to_the_help(words, said, capsys):
    assert openrnn_command.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("openrnn: ")
    assert err.endswith(f"{said}\n")


def test_the_lists_are_those_of_the_package():
    assert listed(options.BACKENDS) == ["auto", *BACKENDS]
    assert listed(bench.SUITES) == [*SUITE_NAMES]
    assert listed(bench.PEERS) == [*PEERS, "none"]
    assert listed(looking.LIBRARIES) == [*LIBRARIES]


def test_the_defaults_of_training_are_those_of_the_package():
    texts = helped(lm.train)
    usual = {one.name: one.default for one in fields(Config)} | {"minutes": MINUTES, "out": OUT}
    usual["corpus"] = "Python's standard library"
    for name, text in texts.items():
        if usual.get(name) is not None:
            more = f"; words {WORDS[name]}" if name in WORDS else ""
            assert default_in(text) == f"{usual[name]}{more}", name
    assert WORDS.keys() <= texts.keys()
    assert listed(texts["task"].partition(": ")[2].partition(" [")[0]) == [*TASKS]


def test_other_defaults_are_those_of_the_package():
    def defaults(function):
        found = inspect.signature(function).parameters.items()
        return {name: one.default for name, one in found if one.default is not None}

    for function, true in (
        (bench.bench, {one.name: one.default for one in fields(Options)} | {"gpus": "1"}),
        (bench.soak, {one.name: one.default for one in fields(Soak)} | {"device": "auto"}),
        (tune.kernels, defaults(tuning.kernels)),
        (tune.regions, defaults(tuning.regions)),
    ):
        for name, default in defaults(function).items():
            assert default == true[name], (function, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name):
    for option, text in helped(COMMANDS[name]).items():
        assert text, option
        assert re.match(r"[A-Z]|auto|cpu|float32|bfloat16", text), (option, text)
        assert not re.search(r"\[\(|\]\]|\(\(|begin no row after", text), (option, text)


def test_all_commands_are_there():
    command = typer.main.get_command(app.app)
    top = {name.partition(" ")[0] for name in COMMANDS}
    assert set(command.commands) == top
    assert {f"tune {name}" for name in command.commands["tune"].commands} == {
        name for name in COMMANDS if " " in name
    }


def test_the_package_is_a_command_too():
    run = "import runpy; runpy.run_module('openrnn', run_name='__main__', alter_sys=True)"
    done = forks.python(run, "explain", "--steps", "x")
    assert done.returncode == 2
    assert "--steps" in done.stderr


def test_a_crash_of_compiled_code_says_where_python_was():
    """Not a mere "Segmentation fault", as once on a machine that was gone by then."""
    code = (
        "import ctypes, openrnn_command\n"
        "assert openrnn_command.main(['--version']) == 0\n"
        "ctypes.string_at(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in string_at" in done.stderr
