"""How Sphinx builds the site: `make docs`. Nothing here needs a network."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))

import gallery_order  # noqa: E402

project = "OpenRNN"
copyright = "2026, the OpenRNN authors"  # Sphinx's name
html_title = "OpenRNN"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "cell_pages",
    "docstrings",
    "mathml",
    "repository_links",
]
exclude_patterns = ["_build", "extensions", "static", "tutorials"]
default_role = "py:obj"  # a single backtick, as docstrings have it
highlight_language = "none"  # of blocks that name no language: drawings and what commands print

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4  # GitHub's anchors, so that one link works in both places

# docs/api names every public object once; a class's docstring says what its arguments are
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("As in torch", "params_style"),
    ("Keyword options beyond torch", "params_style"),
    ("A call also takes", "params_style"),
    "Shapes",
]

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# every script of tutorials/ runs while the site is built; a failure fails the build
sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "gallery_order.Order",
    "default_thumb_file": gallery_order.picture(HERE / "generated" / "tutorial.png"),
    "ignore_repr_types": r"Generator",  # of torch.manual_seed
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "write_computation_times": False,
    "capture_repr": ("_repr_html_", "__repr__"),
}

# of `make links`; the project's own pages are not there before it is published
linkcheck_ignore = [r"https://github\.com/openrnn/openrnn", r"https://pypi\.org/p(roject)?/openrnn"]
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]  # made by scripts
linkcheck_retries, linkcheck_timeout = 2, 15

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
