"""README: its code and commands run as they stand, it is short, and plain to read on PyPI."""

import re
from pathlib import Path

import torch
from test_docs_pages import commands, known, run

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MOST = 110  # lines: one screen and a half


def test_its_code_runs(one_thread, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run("README", TEXT, {})
    assert "1 of 1 recurrent modules turned into those of openrnn" in capsys.readouterr().out


def test_its_commands_are_ours(capsys):
    found = list(commands(TEXT))
    assert found
    for words in found:
        assert known(words), words


def test_it_is_short():
    assert len(TEXT.splitlines()) <= MOST
    assert not re.search(r"^\|", TEXT, re.MULTILINE)  # a table is for a page
    assert "[cuda]" in TEXT
    assert "[onnx]" in TEXT
