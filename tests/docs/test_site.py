"""The pages of the documentation site: links, navigation, and the list of public names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import transformer_ops as tops

ROOT = Path(__file__).parents[2]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


site = load_tool("make_docs")
PAGES = [ROOT / "README.md", *site.pages()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in site.links(page):
        assert site.resolve(page, link).exists()


def test_a_dead_link_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="must lead to a file, got no-such-page"):
        site.resolve(ROOT / "docs" / "blocks.md", "no-such-page.md#anchor")


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/blocks.md", "models.md", "models.md"),
        ("docs/blocks.md", "../CHANGELOG.md", "changes.md"),
        ("docs/gpu/README.md", "../measurements.md#ops", "measurements.md#ops"),
        ("CHANGELOG.md", "docs/gpu/README.md", "gpu.md"),
        ("docs/blocks.md", "../examples/cpp_extension/README.md", "example-library.md"),
        ("docs/blocks.md", "../examples/cpp_extension", "example-library.md"),
        ("docs/blocks.md", "gallery/own_fusion.py", "gallery/own_fusion.rst"),
        ("docs/blocks.md", "../examples/cpp/train.cpp", "../../../examples/cpp/train.cpp"),
    ],
)
def test_links_of_the_site(page: str, link: str, expected: str) -> None:
    assert site.site_link(ROOT / page, link) == expected


def test_code_holds_no_links() -> None:
    parts = list(site.outside_code("a [b](c)\n```cpp\n[&](int i)\n```\n`[](x)` d\n"))
    prose = "".join(text for is_prose, text in parts if is_prose)
    assert "[b](c)" in prose and "int i" not in prose and "(x)" not in prose


def test_every_page_is_in_the_navigation() -> None:
    entries = [link for section in site.sections() for _, link in section.entries]
    listed = {site.resolve(site.HOME, link) for link in entries}
    gallery = set((ROOT / "docs" / "gallery").glob("*.py"))
    assert (set(site.pages()) | gallery) - {site.HOME} <= listed


def public_names() -> list[tuple[str, list[str]]]:
    names: list[tuple[str, list[str]]] = site.api_names(site.API.read_text(encoding="utf-8"))
    return names


def test_the_public_api_is_the_package() -> None:
    """docs/api.md lists what `__all__` has, but for ops, which docs/reference.md lists, submodules,
    and what these share with the package."""
    listed: dict[str, list[str]] = {}
    for module, names in public_names():
        listed.setdefault(module, []).extend(names)
    package = listed.pop("transformer_ops")
    modules = {"memory", "quantization", "recipe", "testing"}
    written = set(tops.__all__) - set(tops.ops.__all__) - modules - {"cmake_prefix_path"}
    assert sorted(package) == sorted(written)
    assert set(listed) == {f"transformer_ops.{name}" for name in modules | {"parallel"}}
    for module, names in listed.items():
        public = set(importlib.import_module(module).__all__) - set(package)
        assert sorted(names) == sorted(public), module
