import raysgd

project = "raysgd"
author = "The raysgd authors"
project_copyright = author
release = version = raysgd.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "benchmark_results/*.md"]

html_theme = "furo"
html_title = f"raysgd {release}"
html_static_path = ["_static"]
html_css_files = ["raysgd.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# the names of a module are those of its __all__, from wherever they come
autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

napoleon_google_docstring = True
napoleon_numpy_docstring = False

# one argument a line where a signature is long, and short names in the table of contents
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"


def keep_first_line(app, what, name, obj, options, lines):
    """Keep napoleon from taking what precedes a colon in the first line for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def setup(app):
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)
