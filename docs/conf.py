"""Sphinx: `make docs` builds docs/_build/html, as strict as it can be, without looking anything up outside."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import readable, skipped

import jaxcomp

DOCS = Path(__file__).parent

project = "jaxcomp"
author = "the jaxcomp authors"
copyright = author
version = release = jaxcomp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
]
exclude_patterns = ["_build", "examples", "**/.ipynb_checkpoints"]
default_role = "code"  # single backticks in docstrings

# Markdown
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Notebooks are shown with the outputs that are stored in them; the tests execute them.
nb_execution_mode = "off"
nb_merge_streams = True
for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
    (DOCS / "notebooks").mkdir(exist_ok=True)
    shutil.copy2(notebook, DOCS / "notebooks" / notebook.name)

# Docstrings
autodoc_typehints = "signature"  # shapes and ranges stand in the docstrings
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
autodoc_preserve_defaults = True
autodoc_mock_imports = ["flwr"]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False

# Pages
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"jaxcomp {release}"
html_static_path = ["_static"]
html_css_files = ["jaxcomp.css"]
smartquotes = False  # options have two hyphens
html_copy_source = False
html_show_sphinx = False


def setup(app):
    app.connect("autodoc-process-docstring", readable, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skipped)
