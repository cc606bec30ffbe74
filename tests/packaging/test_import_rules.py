"""Python in layers: a module imports from its own one and those below, and never in a circle."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "transformer_ops"

# From top to bottom: modules and sub-packages of transformer_ops. Parts of quantization are below
# the ops, which use them, and its regions above.
LAYERS = [
    "testing",
    "models",
    "modules.views",
    "parallel",
    "modules.residual",
    "modules.sequential",
    "modules.fuser",
    "modules",
    "compile",
    "runtime",
    "plan",
    "fusion",
    "memory",
    "reports.step_bytes",
    "ops",
    "quantization",
    "op",
    "quantization.scales",
    "quantization.quantizers",
    "quantization.stored",
    "quantization.quantized_tensor",
    "recipe",
    "quantization.recipe",
    "quantization.number_format",
    "library",
    "reports",
    "base",
    "_loader",
    "_C",
    "_build_info",
]
# No Python sources.
BUILT = ["_C", "_build_info"]


def read_modules(package: Path) -> dict[str, str]:
    """The source of every module by its dotted name; "" is the package itself."""
    sources = {name: "" for name in BUILT}
    for path in set(package.rglob("*.py")) - set(package.glob("lib/*/*")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def find_imports(name: str, source: str, modules: set[str], packages: set[str]) -> set[str]:
    """The modules of the package that a module imports, in functions and for types too."""
    own = name if name in packages else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {n.partition(".")[2] for n in names if n.split(".")[0] == PACKAGE.name}
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            above = own.split(".") if own else []
            above = above[: len(above) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        elif base.split(".")[0] == PACKAGE.name:
            base = base.partition(".")[2]
        else:
            continue
        for alias in node.names:
            inner = f"{base}.{alias.name}" if base else alias.name
            found.add(inner if inner in modules else base)
    return found - {name}


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    modules = set(sources)
    packages = {name.rpartition(".")[0] for name in modules} | {""}
    return {name: find_imports(name, source, modules, packages) for name, source in sources.items()}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle in the order of their imports; empty where there is none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            cycle = search(other, [*path, name])
            if cycle:
                return cycle
        done.add(name)
        return []

    return next((cycle for cycle in (search(name, []) for name in sorted(graph)) if cycle), [])


def find_upward(graph: dict[str, set[str]], layers: list[str]) -> list[str]:
    """The imports from a layer that is not below, as "module -> module"."""
    # The package itself imports what is public, and nothing imports it.
    depth = {name: place for place, name in enumerate(["", *layers])}
    return [
        f"{name} -> {other or PACKAGE.name}"
        for name, imported in sorted(graph.items())
        for other in sorted(imported)
        if layer_of(name, layers) != layer_of(other, layers)
        and depth[layer_of(name, layers)] >= depth[layer_of(other, layers)]
    ]


def layer_of(name: str, layers: list[str]) -> str:
    """A module may have a layer of its own; all others of a sub-package have the same one."""
    return name if name in layers else name.partition(".")[0]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return graph_of(read_modules(PACKAGE))


def test_the_imports_are_seen(graph):
    assert {"op.base", "runtime.layout", "base.handles"} <= graph["modules.sequential"]
    assert {"plan.explain.summary", "plan.plan"} <= graph["plan.explain.text"]
    assert "" not in graph["fusion.registry"] and "_C" in graph["fusion.registry"]


def test_every_module_has_a_layer(graph):
    found = {layer_of(name, LAYERS) for name in graph if name}
    assert found == set(LAYERS)


def test_there_is_no_circle(graph):
    assert find_cycle(graph) == []


def test_arrows_point_down(graph):
    assert find_upward(graph, LAYERS) == []


def test_a_package_says_in_one_sentence_what_lives_there():
    for path in PACKAGE.rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert doc and doc.split("\n\n")[0].endswith("."), path


# ---- the rules can be broken


@pytest.mark.parametrize(
    "line",
    [
        "from ..modules.sequential import Sequential",
        "from ..modules import sequential",
        "import transformer_ops.modules.sequential",
        "from transformer_ops.modules.sequential import Sequential",
        "from transformer_ops.modules import sequential",
        "def late():\n    from ..modules.sequential import Sequential",
        "if TYPE_CHECKING:\n    from ..modules.sequential import Sequential",
    ],
)
def test_an_upward_import_is_found(line):
    sources = read_modules(PACKAGE)
    sources["op.checks"] += "\n" + line + "\n"
    planted = graph_of(sources)
    assert find_upward(planted, LAYERS) == ["op.checks -> modules.sequential"]
    assert {"op.checks", "modules.sequential"} <= set(find_cycle(planted))


def test_an_import_of_what_the_package_makes_public_is_found():
    sources = read_modules(PACKAGE)
    sources["ops.bias"] += "\nfrom .. import Sequential\n"
    assert find_upward(graph_of(sources), LAYERS) == ["ops.bias -> transformer_ops"]


def test_a_circle_within_a_layer_is_found():
    sources = read_modules(PACKAGE)
    sources["op.checks"] += "\nfrom .parameters import new_parameter\n"
    planted = graph_of(sources)
    assert find_upward(planted, LAYERS) == []
    assert find_cycle(planted) == ["op.checks", "op.parameters", "op.checks"]
