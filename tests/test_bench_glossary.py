"""Every suite, row and engine of `openrnn bench` is explained, once, and the command shows it."""

import re

import openrnn_command
from openrnn.bench import glossary
from openrnn.bench.command import SUITE_NAMES
from openrnn.bench.engines import PEERS
from openrnn.bench.suites import SUITES
from openrnn.bench.tables import TITLES


def test_every_suite_and_every_engine_is_explained():
    assert [*glossary.ABOUT_SUITES] == [*SUITE_NAMES]
    assert [*glossary.ABOUT_ENGINES] == [*PEERS]


def test_every_row_of_users_has_one_origin_with_a_source():
    for row in SUITES["users"]:
        found = [origin for origin in glossary.ORIGINS if origin.has(row.name)]
        assert len(found) == 1, row.name
        assert glossary.origin_of(row) is found[0]
        assert re.fullmatch(r"https://\S+", found[0].source)
    for origin in glossary.ORIGINS:
        for pattern in origin.rows.split():
            alone = glossary.Origin(pattern, "", "")
            assert any(alone.has(row.name) for row in SUITES["users"]), pattern
    assert all(glossary.origin_of(row) is None for row in SUITES["cudnn"])


def test_the_terms_are_those_of_the_tables():
    titles = " ".join(TITLES.values())
    for term in ("as called", "from a CUDA graph", "cuDNN's best algorithm"):
        assert term in titles
        assert term in glossary.TERMS


def test_list_explains_what_was_asked_for(capsys):
    assert openrnn_command.main(["bench", "--list", "--rows", "nam*"]) == 0
    said = capsys.readouterr().out
    for word in (*SUITE_NAMES, *PEERS, *glossary.TERMS, "nam-long", "65536x4x1x24", "guitar"):
        assert word in said, word
    assert "isaac" not in said
    assert "https://github.com/sdatkinson/neural-amp-modeler" in said


def test_list_takes_another_suite_and_refuses_what_it_does_not_heed(capsys):
    assert openrnn_command.main(["bench", "--list", "--suite", "host"]) == 0
    assert "gru-t2" in capsys.readouterr().out
    assert openrnn_command.main(["bench", "--list", "--suite", "train"]) == 0
    assert "gru-t2" not in capsys.readouterr().out
    assert openrnn_command.main(["bench", "--list", "--seconds", "3"]) == 2
    assert capsys.readouterr().err == "openrnn: --list does not go with --seconds\n"
