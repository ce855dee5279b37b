"""The site: every link leads somewhere, every page is in a table of contents."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = ("gallery/", "generated/")  # by the build
PAGES = sorted(DOCS.glob("**/*.md")) + sorted(DOCS.glob("api/*.rst"))
PAGES = [page for page in PAGES if not re.search(r"/(_build|gallery|generated)/", page.as_posix())]
MARKDOWN = sorted({*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("benchmarks/log/*.md"),
                   *ROOT.glob("examples/**/*.md")})  # fmt: skip

FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`+)[^`](?:.*?[^`])?\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(text):
    """A page without its code."""
    return SPAN.sub("", FENCE.sub("", text))


def anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found = []
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        seen = found.count(slug)
        found.append(slug if not seen else f"{slug}-{seen}")
    return found


def broken(page, text):
    """The links of a page that lead nowhere, with the reason."""
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        if name.startswith(MADE):
            continue
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


def entries(page, text):
    """What the tables of contents of a page list, as paths below docs without suffix."""
    for body in TOCTREE.findall(text):
        for line in body.splitlines():
            target = re.sub(r".*<(.*)>$", r"\1", line.strip())
            if target and not target.startswith(":"):
                yield (page.parent / target).relative_to(DOCS).as_posix()


def named(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", MARKDOWN, ids=named)
def test_every_link_leads_somewhere(page):
    assert not list(broken(page, page.read_text(encoding="utf-8")))


def test_every_page_is_in_one_table_of_contents():
    listed = [entry for page in PAGES for entry in entries(page, page.read_text(encoding="utf-8"))]
    there = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    written = [entry for entry in listed if not entry.startswith(MADE)]
    assert sorted(written) == sorted(there), "list each page once, in a toctree of docs/index.md"


def test_pages_that_include_a_file_name_one():
    for page in PAGES:
        for name in INCLUDE.findall(page.read_text(encoding="utf-8")):
            assert name.startswith(MADE) or (page.parent / name).is_file(), (page, name)


# and the tests themselves, on planted faults


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[a](nowhere.md)", 1),
        ("[a](index.md#nowhere)", 1),
        ("[a](#here)\n\n# There", 1),
        ("![a](nowhere.png)", 1),
        ("[a](index.md#openrnn) and [b](https://example.org/x)", 0),
        ("# A `b` c, d\n[a](#a-b-c-d)", 0),
        ("`[a](nowhere.md)`\n\n```\n[a](nowhere.md)\n```", 0),
    ],
)
def test_a_broken_link_is_seen(text, count, tmp_path):
    page = DOCS / "page-of-a-test.md"
    if "#here" in text or "#a-b" in text:
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
    assert len(list(broken(page, text))) == count


def test_entries_of_a_toctree():
    text = "```{toctree}\n:hidden:\n\nkernels\nOne <api/layers>\n```\n"
    assert list(entries(DOCS / "index.md", text)) == ["kernels", "api/layers"]
