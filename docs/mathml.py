"""Formulas as MathML, made at build time by docutils: browsers show it without any script."""

import html

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

__all__ = ["setup"]


def mathml(node: nodes.Element, as_block: bool) -> str:
    """A formula that docutils does not know is a warning, and so an error of `make docs`."""
    tex = node.astext()
    try:
        return tex2mathml(tex, as_block=as_block)
    except MathError as error:
        logging.getLogger(__name__).warning("formula %r: %s", tex, error, location=node)
        return f"<code>{html.escape(tex)}</code>"


def inline(translator, node: nodes.math) -> None:
    translator.body.append(mathml(node, False))
    raise nodes.SkipNode


def block(translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node, True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True}
