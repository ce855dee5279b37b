"""Links that work on GitHub work on the site, written once.

A link of a Markdown file is relative to that file. What it names below `docs` is a page here, so
are three files of the repository's root and the scripts of tutorials. Any other file is copied and
can be downloaded.
"""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")


def on_site(target: str, anchor: str, folder: Path) -> str:
    """The target of a link in a file of `folder`, as a page of `docs` writes it."""
    path = (folder / target).resolve()
    if path.parent == DOCS / "tutorials":
        return f"gallery/{path.stem}.rst{anchor}"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix() + anchor
    if path.parent == ROOT and path.name in PAGES:
        return PAGES[path.name] + anchor
    beside = Path(os.path.relpath(path, DOCS)).as_posix()
    return f"path:{beside}" if path.suffix not in {".png", ".svg"} else beside


def _rewritten(text: str, folder: Path) -> str:
    return LINK.sub(lambda match: on_site(match[1], match[2] or "", folder), text)


def _page(app: Sphinx, name: str, source: list[str]) -> None:
    folder = DOCS / Path(name).parent
    if folder == DOCS and app.env.doc2path(name).suffix == ".md":
        source[0] = _rewritten(source[0], DOCS)


def _included(app: Sphinx, path: Path, parent: str, source: list[str]) -> None:
    source[0] = _rewritten(source[0], (DOCS / path).resolve().parent)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _page)
    app.connect("include-read", _included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
