"""Classes of modules as source, and what they are made of: submodules, numbers, statements."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from .module_parts import with_parts

# A statement, or what begins a block and the statements in it.
Node = str | tuple[str, list[Any]]
HOLE = "@"


@dataclass
class Source:
    """Classes: attributes of each, statements of `__init__`, decorators and statements of
    `forward`. The last one is `Main`, which may use the one before it."""

    members: list[Node]
    init: list[Node]
    decorators: list[Node]
    body: list[Node]
    # The names of submodules, by kind.
    parts: dict[str, list[str]] = field(default_factory=dict)
    inner: Source | None = None
    name: str = "Main"

    def text(self, others: str = "") -> str:
        """The whole source; `others` is text that may also name parts."""
        return with_parts(self.classes(), others)

    def classes(self) -> str:
        forward = ("def forward(self, x, y=None, flag=False):", self.body or ["pass"])
        init = ("def __init__(self):", ["super().__init__()", *self.init])
        members = [*self.members, init, *self.decorators, forward]
        own = "\n".join(_lines((f"class {self.name}(nn.Module):", members), 0)) + "\n"
        words = set(re.findall(r"self\.(\w+)", own))
        called = ["\n".join(_lines(METHODS[name], 1)) for name in METHODS if name in words]
        before = self.inner.classes() + "\n\n" if self.inner and "Inner" in own else ""
        return before + own + "\n".join(called)


def _lines(node: Node, depth: int) -> list[str]:
    if isinstance(node, str):
        return textwrap.indent(node, "    " * depth).splitlines()
    head, inner = node
    found = textwrap.indent(head, "    " * depth).splitlines()
    for one in inner or ["pass"]:
        found += _lines(one, depth + 1)
    return found


# What statements may call for its effect.
METHODS: dict[str, Node] = {
    "probe": ("def probe(self, t):", ["note(t.detach().sum())", "return t"]),
    "count": ("def count(self):", ["self.n += 1", "return self.n"]),
    "check": (
        "def check(self, t):",
        ["if self.limit is not None and t.shape[-1] > self.limit: raise ValueError(self.limit)"],
    ),
    "noted": "@property\ndef noted(self): return note(self.n)",
}
STATE = ["self.n, self.limit, self.last, self.seen, self.on = 0, None, None, [], True"]
STATE += ["self.register_buffer('total', torch.zeros(()))"]

NORMS = ["nn.LayerNorm(D)", "nn.LayerNorm(D, bias=False)", "nn.RMSNorm(D)", "LlamaNorm(D)"]
NORMS += ["FunctionNorm(D)", "LayerNormFp32(D)", "FastLayerNorm(D)", "PlainNorm(D)"]
NORMS += ["GemmaNorm(D)", "OffsetNorm(D)", "CohereNorm(D)", "nn.LayerNorm(D)", "LlamaNorm(D)"]
# Shapes and kinds that the forms were not written for.
ODD_NORMS = ["LlamaNorm((T, D))", "LlamaNorm((1, D))", "LlamaNorm(1)", "LlamaNorm(())"]
ODD_NORMS += [
    f"{kind}(D, {eps})"
    for kind in ("LlamaNorm", "GemmaNorm", "OffsetNorm", "CohereNorm")
    for eps in ("nn.Parameter(torch.tensor(0.1))", "torch.tensor(0.1)", "np.float64(0.1)", "1")
]
ODD_NORMS += ["GemmaNorm((T, D))", "GemmaNorm(1)", "OffsetNorm((T, D))", "OffsetNorm(1)"]
ODD_NORMS += ["CohereNorm((T, D))", "CohereNorm(1)", "nn.LayerNorm((T, D))", "nn.RMSNorm((T, D))"]
ODD_NORMS += ["nn.LayerNorm(D, elementwise_affine=False)", "nn.RMSNorm(D, eps=0.1)"]
ACTS = ["nn.GELU()", "nn.SiLU()", "nn.ReLU()", "nn.GELU('tanh')", "QuickGELU()", "nn.GELU()"]
ODD_ACTS = ["nn.Tanh()", "nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)", "CallsAct(F.gelu)"]
ODD_ACTS += ["CallsAct(functools.partial(F.gelu, approximate='tanh'))", "nn.Softplus()"]
ODD_ACTS += ["CallsAct(helper)", "F.silu", "F.gelu", "helper", "ACTS['silu']"]
MODULES = ["MLP()", "GatedMLP()", "GatedMLP(nn.GELU(), True)", "NotedMLP()", "MLP(nn.Tanh())"]
MODULES += ["nn.Sequential(nn.LayerNorm(D), nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))"]
MODULES += ["nn.Sequential(nn.Linear(D, D), nn.ReLU())", "nn.Sequential(nn.Linear(D, D))"]
MODULES += ["nn.Sequential()", "Doubled()", "nn.Sequential(*[nn.Linear(D, D), nn.SiLU()] * 2)"]
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "norm": (NORMS, ODD_NORMS),
    "lin": (
        ["nn.Linear(D, D)", "nn.Linear(D, D, bias=False)", "Conv1D(D, D)", "FalconLinear(D, D)"],
        ["Adapter(nn.Linear(D, D))", "FalconLinear(D, D, False)"],
    ),
    "up": (["nn.Linear(D, H)", "nn.Linear(D, H, bias=False)"], ["Adapter(nn.Linear(D, H))"]),
    "both": (["nn.Linear(D, 2 * H)"], ["nn.Linear(D, 2 * H, bias=False)"]),
    "down": (["nn.Linear(H, D)", "nn.Linear(H, D, bias=False)"], ["nn.Linear(H, 1)"]),
    "one": (["nn.Linear(D, 1)"], ["nn.Linear(D, 1, bias=False)"]),
    "act": (ACTS, ODD_ACTS),
    "drop": (["nn.Dropout(0.0)", "nn.Identity()", "DropPath()"], ["DropPath(0)", "nn.Dropout(0)"]),
    "scale": (["LayerScale(D)"], ["LayerScale(1)", "LayerScale(D, True)", "LayerScale((T, D))"]),
    "mlp": (MODULES[:3], MODULES[3:]),
    "inner": (["Inner()"], ["nn.Sequential(Inner(), nn.Linear(D, D))"]),
    "attention": (["Attention()"], ["Attention(False)"]),
}
ATTENTION_CALLS = ["(@, is_causal=flag)", "(@, attn_mask=None)", "(@, None, flag)", "(@)"]
PATTERNS = ["residual"] * 4 + ["plain", "sum", "norm", "parallel", "normed", "cond", "rows"]
PATTERNS += ["method"]
# Where a number may stand, and what it may be.
NUMBERS = ["0.5", "2", "np.float64(0.5)", "np.float32(0.5)", "torch.tensor(0.5)", "True", "-1.5"]
NUMBERS += [
    "nn.Parameter(torch.rand(D))",
    "nn.Parameter(torch.rand(1))",
    "None",
    "1.0",
    "float('nan')",
]
NUMBERS += ["nn.Parameter(torch.rand(()))", "torch.rand(D)", "nn.Parameter(torch.rand(T, D))"]
NUMBER_KINDS = ["own", "own", "own", "class", "property", "list", "config", "global"]
NUMBER_KINDS += ["counting"]
FUNCTIONS = ["F.silu(@)", "F.gelu(@)", "F.relu(@)", "F.gelu(@, approximate='tanh')", "silu(@)"]
FUNCTIONS += ["F.relu(@).square()", "torch.square(F.relu(@))", "nn.functional.silu(@)", "act(@)"]
FUNCTIONS += ["F.gelu(@, approximate=self.config.approximate)", "ACTS[self.config.act](@)"]
FUNCTIONS += ["F.gelu(input=@)", "F.silu(@, inplace=False)", "torch.nn.functional.gelu(@)"]

# T5's.
CAST = (
    "part(@.to(part.weight.dtype) if isinstance(part.weight, torch.Tensor) and @.dtype != "
    "part.weight.dtype and part.weight.dtype != torch.int8 else @)"
)
DECORATORS = ["@torch.no_grad()", "@noting", "@doubling", "@torch.enable_grad()", "@renamed"]
DECORATORS += ["@torch.autocast('cpu', torch.bfloat16)", "@functools.lru_cache"]

# `v` and `w` are variables, `n` is a new one.
NOISE = """
_ = self.probe({v})
k = self.count()
ok = self.check({v})
k = self.noted
{n} = {v}.mul_(2)
{n} = {v}.detach().mul_(2)
{v}.add_(1)
{v}.detach().mul_(0.5)
self.last = {v}
self.n += 1
self.n = self.n + 1
self.total += 1
self.total.add_({v}.detach().sum())
self.seen.append({v}.detach().sum())
note({v})
note({v}.shape)
note({v} is {w})
note({v}.requires_grad)
note(f"{{{v}.shape}}")
{n} = note({v})
_ = tick()
_ = [note(1) for _ in range(2)]
{n} = helper({v})
{v} = helper({v})
del {v}
{v} += {w}
{v} *= 2
{v} = {v} * 2
{v} -= FACTOR
{n} = torch.rand_like({v})
{n} = torch.rand(2)
{n} = {v} + torch.rand_like({v})
{v} = {v} + torch.rand(D)
{n} = {v}
{n} = {v}
{n} = {v}.shape
{n} = {v}.shape[-1]
{n} = {v}.dtype
{n} = {v} * 2
{n} = {v} + {w}
{n} = {v}.detach()
{n} = {v}.view(-1)
{n} = self.on
{n} = {v}.to(torch.float64)
{n} = torch.zeros_like({v})
{n}, k = {v}, {w}
{n} = ({v}, {w})
{n} = [{v}, {w}]
{n} = {v} if self.count() else {w}
{n} = {v} if self.on else {w}
{n} = lambda: note({v})
{n} = lambda: {v}
{n} = [{v} for _ in range(2)]
{n} = sum(t for t in [{v}, {v}])
note(sorted(name for name in locals() if not name.startswith("_tops")))
note(locals().get("{v}"))
note(eval("{v}"))
exec("note({v})")
note(len(vars()) > 0)
k = 1; {n} = {v} + k
note(1); {n} = {v}
{v}.register_hook(lambda grad: note(grad))
{v}.retain_grad() if {v}.requires_grad and not {v}.is_leaf else None
assert {v} is not None
assert self.check({v}) is None
self.scratch = {v}.detach()
self.on = not self.on
self.limit = self.limit
{v}[0] = 0
{v}[..., 0].mul_(2)
torch.manual_seed(1)
{n} = (k := {v} * 2)
note((k := {v}))
SETTINGS.seen = {v}.detach().sum()
{v} = {v}.contiguous()
{v} = {v}.clone()
{v}: torch.Tensor = {v}
{n}: int
pass
{p}.weight.data.mul_(0.5)
{p}.weight = nn.Parameter({p}.weight * 2)
{p}.extra = {v}
{p}.train(False)
{n} = {p}.weight
{n} = {p}({v})
{n} = {p}
_ = {p}.register_forward_hook(lambda part, given, out: note(1) and None)
"text"
global G; G = {v}
G = {v}
x = {v}
y = {v}
{v} = x
flag = not flag
""".strip().splitlines()
# The head of a block, and what is in it.
BLOCKS: list[tuple[str, list[str]]] = [
    ("if flag:", ["return {v}"]),
    ("if flag:", ["{v} = {v} * 2"]),
    ("if self.on:", ["return {v}, x"]),
    ("if self.on:", ["{v} = {v} * 2"]),
    ("if not self.on:", ["return x"]),
    ("if ON:", ["{v} = {v} * 3"]),
    ("if y is not None:", ["{v} = {v} + y"]),
    ("if y is None:", ["y = x"]),
    ("if self.limit is None:", ["note({v})"]),
    ("if self.count() > 2:", ["return {v}"]),
    ("if (k := {v}.detach().sum()) is None:", ["return k"]),
    ("if {v}.shape[-1] > 100:", ["return x"]),
    ("if torch.is_grad_enabled():", ["note({v})"]),
    ("if self.training:", ["{v} = {v} * 0.5"]),
    ("with torch.no_grad():", ["{n} = {v} * 2"]),
    ("with torch.no_grad():", ["{v} = {v} * 2"]),
    ("for k in range(2):", ["{v} = {v} * 0.5"]),
    ("for k in range(self.count()):", ["{n} = {v}"]),
    ("while self.count() % 3:", ["{v} = {v} * 0.5"]),
    ("def {n}():", ["return note({v})"]),
    ("def {n}():", ["nonlocal {v}", "{v} = {v} * 2"]),
    ("def {n}(t={v}):", ["return note(t)"]),
    ("def {n}():", ["global COUNT", "COUNT += 1", "return {v}"]),
    ("class {n}:", ["value = {v}"]),
]
CALLS = ["note({f}())", "{v} = {v} + {f}().sum() if {f}() is not None else {v}", "{f}()"]
