"""Configuration of the documentation."""

from mstar.version import __version__

project = "mstar"
author = "the mstar authors"
copyright = author
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
html_theme = "furo"
exclude_patterns = ["_build"]
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
myst_heading_anchors = 3
nitpicky = False
suppress_warnings = ["ref.python", "ref.term"]
