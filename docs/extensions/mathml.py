"""Equations as MathML, which browsers draw themselves: no script, no font, no network."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _aligned(tex: str) -> str:
    """Several lines, or columns, stand in one environment that docutils knows."""
    inner = tex.strip().removeprefix(r"\begin{split}").removesuffix(r"\end{split}").strip()
    for name in ("align*", "align"):
        inner = inner.replace(f"{{{name}}}", "{aligned}")
    if r"\begin{aligned}" in inner or not (r"\\" in inner or "&" in inner):
        return inner
    return rf"\begin{{aligned}}{inner}\end{{aligned}}"


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="equation"))
    self.body.append(tex2mathml(_aligned(node.astext()), as_block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
