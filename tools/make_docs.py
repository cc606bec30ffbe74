"""Builds the documentation site in build/docs/html: `make docs`.

The pages are the Markdown files of docs/ and a few of other folders, as the forge shows them. They
are copied to build/docs/source with three changes, and Sphinx builds the site from the copies:

- links go to the page that the file became, or to a download of a file that is no page;
- the sections of docs/README.md become the navigation;
- the lists of names in docs/api.md become tables, with a page for each name; so do all ops.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "docs"
HOME = DOCS / "README.md"
API = DOCS / "api.md"
CSRC = ROOT / "csrc"
# Pages from elsewhere, and those whose name differs on the site.
NAMES = {
    HOME: "index.md",
    DOCS / "gpu" / "README.md": "gpu.md",
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changes.md",
    ROOT / "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "RELEASING.md": "releasing.md",
    ROOT / "SECURITY.md": "security.md",
    ROOT / "examples" / "cpp_extension" / "README.md": "example-library.md",
}
HEADERS_PAGE = "cpp-headers.md"
# Code blocks, and code within a line: what looks like a link there is none.
CODE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FILE_LINK = re.compile(r"\[([\w/-]+\.md)\](?=\(([^)\s]+)\))")
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"^- \[(.+?)\]\(([^)]+)\)", re.MULTILINE)
NAMES_LIST = re.compile(r"<!-- api( \S+)? -->\n(.*?)<!-- /api -->", re.DOTALL)
ALL_OPS = "<!-- all ops -->"
REMOTE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


class Section(NamedTuple):
    """A part of the navigation."""

    title: str
    text: str
    entries: list[tuple[str, str]]  # (title, link)

    @property
    def page(self) -> str:
        """Where the site lists its entries."""
        return f"{self.title.lower().replace(' ', '-')}-pages.md"


def pages() -> dict[Path, str]:
    """Every page: its file, and its name on the site. README.md is the home page of the forge."""
    found = {path: path.name for path in sorted(DOCS.glob("*.md"))} | NAMES
    return {path: name for path, name in found.items() if path != ROOT / "README.md"}


def outside_code(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a page in order, with whether each is prose."""
    end = 0
    for code in CODE.finditer(text):
        yield True, text[end : code.start()]
        yield False, code[0]
        end = code.end()
    yield True, text[end:]


def links(path: Path) -> Iterator[str]:
    """The targets of all links of a page to files of this tree."""
    for is_prose, part in outside_code(path.read_text(encoding="utf-8")):
        if is_prose:
            yield from (link for link in LINK.findall(part) if _is_local(link))


def resolve(path: Path, link: str) -> Path:
    """The file that a link of the page `path` leads to. FileNotFoundError if there is none."""
    target = Path(os.path.normpath(path.parent / link.partition("#")[0]))
    if not target.exists():
        raise FileNotFoundError(
            f"{path.relative_to(ROOT)}: the link must lead to a file, got {link}"
        )
    return target


def site_link(path: Path, link: str) -> str:
    """The same link on the site, where every page is in the top folder."""
    anchor = link.partition("#")[2]
    found = resolve(path, link)
    readme = found / "README.md"
    page = {**pages(), **NAMES}.get(readme if readme in NAMES else found)
    if page is None and found.parent == DOCS / "gallery":
        page = f"gallery/{found.stem}.rst" if found.suffix == ".py" else "gallery/index.rst"
    if page is None and found == DOCS / "gallery":
        page = "gallery/index.rst"
    if page is None:
        page = os.path.relpath(found, BUILD / "source")
    return f"{page}#{anchor}" if anchor else page


def site_text(path: Path, text: str | None = None) -> str:
    """A page, or a part of its text, with the links of the site. A link that shows the name of a
    file shows the title of its page."""
    entries = [entry for section in sections() for entry in section.entries]
    titles = {resolve(HOME, link): title for title, link in entries}

    def replaced(link: re.Match[str]) -> str:
        return site_link(path, link[0]) if _is_local(link[0]) else link[0]

    def titled(link: re.Match[str]) -> str:
        return f"[{titles.get(resolve(path, link[2]), link[1])}]"

    text = path.read_text(encoding="utf-8") if text is None else text
    return "".join(
        LINK.sub(replaced, FILE_LINK.sub(titled, part)) if is_prose else part
        for is_prose, part in outside_code(text)
    )


def sections() -> list[Section]:
    """The links of the home page."""
    text = HOME.read_text(encoding="utf-8")
    return [
        Section(title, body, ENTRY.findall(body))
        for title, body in SECTION.findall(text)
        if ENTRY.search(body)
    ]


def api_names(text: str) -> list[tuple[str, list[str]]]:
    """The lists of public names in docs/api.md: the module of each, and its names."""
    return [
        (f"transformer_ops{module.strip() and '.'}{module.strip()}", re.findall(r"`(\w+)`", body))
        for module, body in NAMES_LIST.findall(text)
    ]


def main() -> int:
    """The command line. Returns the exit status of Sphinx."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="run the gallery again")
    options = parser.parse_args()
    if importlib.util.find_spec("sphinx") is None:
        found = ".".join(map(str, sys.version_info[:2]))
        print(f"[docs] Python must be 3.11 or newer with Sphinx, got {found}", file=sys.stderr)
        return 1
    if options.fresh:
        shutil.rmtree(BUILD, ignore_errors=True)
    _copy(BUILD / "source")
    build: list[str | Path] = ["-W", "--keep-going", "-q", "-b", "html", "-c", DOCS / "site"]
    build += ["-d", BUILD / "doctrees", BUILD / "source", BUILD / "html"]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    status = subprocess.run([sys.executable, "-m", "sphinx", *build], env=environment).returncode
    remote = list(_remote_assets(BUILD / "html")) if status == 0 else []
    for line in remote:
        print(f"[docs] a page must load nothing from elsewhere, got {line}", file=sys.stderr)
    if not status and not remote:
        print(f"{BUILD / 'html' / 'index.html'}")
    return status or bool(remote)


def _is_local(link: str) -> bool:
    return not link.startswith(("#", "http://", "https://", "mailto:"))


def _copy(source: Path) -> None:
    """All pages in the folder that Sphinx reads. A file that is as before keeps its time."""
    made = {name: site_text(path) for path, name in pages().items()}
    made["api.md"] = _with_tables(made["api.md"])
    made[HEADERS_PAGE] = _headers()
    tops = []
    for section in sections():
        entries = [(title, site_link(HOME, link)) for title, link in section.entries]
        if any(link.startswith("gallery/") for _, link in entries):
            tops.append((section.title, "gallery/index.rst"))
            continue
        text = site_text(HOME, section.text)
        if section.title == "Reference":
            entries.append(("C++ headers", HEADERS_PAGE))
            text = f"{text.rstrip()}\n- [C++ headers]({HEADERS_PAGE}), for a library in C++\n"
        made[section.page] = f"# {section.title}\n\n{text}\n{_toctree(entries)}"
        tops.append((section.title, section.page))
    made["index.md"] += _toctree(tops)
    source.mkdir(parents=True, exist_ok=True)
    for old in source.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        _write(source / name, text)
    for picture in DOCS.glob("*.svg"):
        shutil.copy2(picture, source / picture.name)


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _toctree(entries: list[tuple[str, str]]) -> str:
    lines = [f"{title.replace('`', '')} <{Path(link.partition('#')[0]).with_suffix('')}>"
             for title, link in entries]  # fmt: skip
    return "\n".join(["", "```{toctree}", ":hidden:", "", *lines, "```", ""])


def _with_tables(text: str) -> str:
    from transformer_ops import ops

    def table(found: re.Match[str]) -> str:
        ((module, names),) = api_names(found[0])
        return rows_of(module, names)

    def rows_of(module: str, names: list[str]) -> str:
        rows = [f"   {name}" for name in names]
        head = ["```{eval-rst}", f".. currentmodule:: {module}", "", ".. autosummary::"]
        return "\n".join([*head, "   :toctree: api", "   :nosignatures:", "", *rows, "```"])

    text = text.replace(ALL_OPS, rows_of("transformer_ops", sorted(ops.__all__, key=str.lower)))
    return NAMES_LIST.sub(table, text)


def _headers() -> str:
    """The headers that docs/cpp-extension.md lists, as they are."""
    page = (DOCS / "cpp-extension.md").read_text(encoding="utf-8")
    table = page.partition("\n## Headers\n")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:op|fuser|runtime)/\w+\.h)`", table)
    text = (
        "# C++ headers\n\nThese are the headers that a library of your own includes. "
        "[A library in C++](cpp-extension.md) says how.\n"
    )
    for name in dict.fromkeys(named):
        path = os.path.relpath(CSRC / name, BUILD / "source")
        text += f"\n## {name}\n\n```{{literalinclude}} {path}\n:language: cpp\n```\n"
    return text


def _remote_assets(html: Path) -> Iterator[str]:
    for path in sorted(html.rglob("*.html")):
        for tag in REMOTE.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(html)}: {tag}"


if __name__ == "__main__":
    sys.exit(main())
