"""Sphinx's configuration: tools/make_docs.py makes the pages that it reads."""

import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import transformer_ops  # noqa: E402

project = "transformer_ops"
author = "the transformer_ops contributors"
version = release = transformer_ops.__version__
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
myst_heading_anchors = 4
suppress_warnings = ["config.cache"]  # sphinx_gallery_conf holds a class
templates_path = [str(Path(__file__).parent / "templates")]
exclude_patterns = ["gallery/*.md5"]
highlight_language = "default"

autosummary_generate = True
autodoc_default_options = {"member-order": "bysource", "exclude-members": "extra_repr"}
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Shapes", "params_style")]


class _Order:
    """The pages of the gallery in the order of docs/README.md."""

    def __init__(self, folder: str) -> None:
        self.text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")

    def __call__(self, name: str) -> int:
        return self.text.index(f"gallery/{name}")


sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "docs" / "gallery"),
    "gallery_dirs": "gallery",
    "filename_pattern": r".*\.py",
    "within_subsection_order": _Order,
    "write_computation_times": False,
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "remove_config_comments": True,
    "reset_modules": (),
    "abort_on_example_error": True,
    "copyfile_regex": "",
}

html_theme = "pydata_sphinx_theme"
html_title = "transformer_ops"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_use_index = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "transformer_ops"},
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": []}

# The gallery runs here: what other libraries warn about is none of its reader's concern.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)


CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)", re.DOTALL)
COLON = "\0"  # napoleon takes what is before the first colon of a property for its type
HEADING = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|Examples|Note):$")


def to_rst(lines: list[str]) -> list[str]:
    """A docstring, whose code is written as in Markdown, in reStructuredText."""
    text = CODE.sub(_literal, "\n".join(lines))
    made: list[str] = []
    for line in text.split("\n"):
        above = next((one for one in reversed(made) if one), "")
        is_block = line.startswith("    ") and made and not made[-1]
        if is_block and not above.startswith(" ") and not HEADING.match(above):
            made += ["::", ""]
        made.append(line)
    return made


def _literal(code: re.Match[str]) -> str:
    # A word that goes on behind the code needs a sign between.
    text = " ".join(code[1].split())
    return f"``{text}``" + (f"\\ {code[2]}" if code[2] else "")


def _process_docstring(app: Any, what: str, name: str, item: Any, options: Any, lines: Any) -> None:
    lines[:] = to_rst(lines)
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(":", COLON)


def _restore_colons(app: Any, what: str, name: str, item: Any, options: Any, lines: Any) -> None:
    lines[:] = [line.replace(COLON, ":") for line in lines]


def _skip_member(
    app: Any, what: str, name: str, item: Any, skip: bool, options: Any
) -> bool | None:
    # The fields of a NamedTuple, which the docstring of the class describes.
    return True if (getattr(item, "__doc__", None) or "").startswith("Alias for field") else None


def setup(app: Any) -> None:
    # Before and after napoleon (500), which reads the sections.
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    app.connect("autodoc-process-docstring", _restore_colons, priority=600)
    app.connect("autodoc-skip-member", _skip_member)
