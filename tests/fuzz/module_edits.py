"""Random edits of a module between its calls, and random calls, as source."""

from __future__ import annotations

import random

from .module_sources import Source

# `{a}` is a submodule, `{l}` one with a weight, `{n}` a norm, `{s}` a number.
EDITS = """
{l}.weight.data.mul_(0.5)
{l}.weight = nn.Parameter({l}.weight.detach() * 2)
{l}.weight.data = {l}.weight.data * 2
{l}.weight.data = torch.rand_like({l}.weight)
{l}.weight.requires_grad_(not {l}.weight.requires_grad)
{l}.bias = None
{l}.bias = nn.Parameter(torch.rand(1).double())
{l}.bias = nn.Parameter(torch.rand({l}.weight.shape[0]).double())
{l}.weight = nn.Parameter({l}.weight.detach().float())
with torch.no_grad(): {l}.weight.add_(0.1)
del {l}.weight; {l}.weight = torch.rand(D, D).double()
{l}.weight = nn.Parameter(torch.rand(1).double())
{l}.register_parameter("extra", nn.Parameter(torch.rand(1).double()))
nn.utils.parametrize.register_parametrization({l}, "weight", Doubled())
nn.utils.parametrizations.weight_norm({l})
{a} = Adapter({a})
{a} = Adapter({a}); {a}.disabled = True
{a} = getattr({a}, "base_layer", {a})
{a} = Doubled()
{a} = nn.Identity()
{a} = copy.deepcopy({a})
{a} = nn.Sequential({a}, Doubled())
{a} = nn.Sequential({a})
{a} = NotedMLP().double()
{a} = None
{a}.forward = lambda x: x * 2
{a}.forward = {a}.forward
{a}.__dict__.pop("forward", None)
{a}.__class__ = type("Other", (type({a}),), dict(forward=lambda self, x: x * 3))
{a}.__class__ = type("Same", (type({a}),), dict())
{a}.train(); {a}.training = False
{a}.inplace = True
{a}.p = 0
{a}.act = F.relu
{a}._forward_hooks[1] = lambda part, given, out: out * 2
{a}._forward_hooks.clear()
{a}._forward_pre_hooks = collections.OrderedDict()
{a}._call_impl = lambda x: x * 2
del {a}
{l}.__dict__["weight"] = torch.rand_like({l}.weight)
{l}.__dict__["bias"] = None
{l}.__dict__.pop("weight", None)
{l}._parameters["weight"] = nn.Parameter(torch.rand_like({l}.weight))
{l}.weight = first(m, nn.Linear).weight
nn.utils.prune.random_unstructured({l}, "weight", 0.5)
nn.utils.weight_norm({l})
m._modules["{b}"] = Doubled()
Main.{b} = Doubled()
Main.{b} = property(lambda self: self._modules["{b}"])
Main.{b} = property(lambda self: note(Doubled()) and None)
del Main.{b}
{a}.act_fn = nn.ReLU()
{a}.approximate = "tanh"
{a}.approximate = "none"
m.__dict__["{b}"] = Doubled()
m.__dict__["{b}"] = helper
m.__dict__.pop("{b}", None)
m.__dict__["forward"] = lambda x, *a, **k: x * 2
m.__dict__.pop("forward", None)
m.__dict__["helper"] = 1
{n}.eps = 0.1
{n}.eps = 1
{n}.eps = np.float64(0.1)
{n}.eps = torch.tensor(0.1)
{n}.eps = None
{n}.variance_epsilon = 0.1
{n}.variance_epsilon = nn.Parameter(torch.tensor(0.1))
{n}.add_unit_offset = True
{n}.dim = -2
{n}.normalized_shape = (T, D)
{n}.elementwise_affine = False
type({n})._norm = lambda self, x: x * 3
{n}._norm = lambda x: x * 3
{a}.gamma = nn.Parameter(torch.rand(1).double())
{a}.drop_prob = 0
LlamaNorm.forward = lambda self, x: x * 2
GemmaNorm._norm = lambda self, x: x * 2
GemmaNorm.eps = 0.5
LayerScale.forward = lambda self, x: x * 2
MLP.forward = lambda self, x: x * 2
MLP.__call__ = lambda self, x: x * 2
QuickGELU.__call__ = lambda self, x: x * 2
QuickGELU.forward = lambda self, x: x * 2
CallsAct.forward = lambda self, x: x * 2
Main.forward = lambda self, x, y=None, flag=False: x * 2
Main.probe = lambda self, t: note(t.detach().mean())
Main.__call__ = lambda self, *a, **k: note(1)
Main.count = lambda self: 3
{s} = 0.25
{s} = 2
{s} = None
{s} = True
{s} = np.float64(0.25)
{s} = torch.tensor(0.25)
{s} = nn.Parameter(torch.rand(D).double())
{s} = nn.Parameter(torch.rand(1).double())
{s} = {s} * 2
{s}[0] = 0.25
m._{t} = 0.25
del {s}
m.__dict__["{t}"] = 0.125
Main.{t} = property(lambda self: 0.5 + tick())
m._{t} = None
m._{t} = nn.Parameter(torch.rand(D).double())
m.config.{t} = 0.25
m.config.{t} = None
Main.{t} = 0.25
Main.{t} = None
Main.{t} = property(lambda self: 0.125)
m.config.act = "relu"
m.config.approximate = "none"
m.config = types.SimpleNamespace(**dict(vars(m.config), act="gelu", approximate="none"))
m.config = copy.copy(m.config); m.config.act = "gelu"
SETTINGS.scale = 0.1
FACTOR = 0.1
FACTOR = torch.tensor(0.1)
ON = not ON
ON = False
helper = lambda t: t * 3
act = lambda t: t * 3
silu = F.relu
ACTS["silu"] = F.relu
ACTS = dict(ACTS, silu=F.gelu, gelu=F.relu)
F.silu = F.relu
F.silu = lambda t, inplace=False: t * 2
F.gelu = lambda t, approximate="none": t * 2
F.relu = lambda t, inplace=False: t * 2
F.linear = lambda t, w, b=None: t @ w.T * 2
F.layer_norm = lambda t, *a, **k: t * 2
F.rms_norm = lambda t, *a, **k: t * 2
F.dropout = lambda t, *a, **k: t * 2
torch.rsqrt = lambda t: t
torch.sigmoid = lambda t: t
torch.square = lambda t: t
torch.nn.functional = types.SimpleNamespace(**dict(vars(F), silu=F.relu))
nn = types.SimpleNamespace(**dict(vars(nn), functional=types.SimpleNamespace(silu=F.relu)))
F = types.SimpleNamespace(**dict(vars(F), silu=F.relu, gelu=F.relu))
math = None
nn.Linear.forward = lambda self, t: t @ self.weight.T
nn.Linear.__call__ = lambda self, t: t @ self.weight.T
nn.GELU.forward = lambda self, t: t
nn.LayerNorm.forward = lambda self, t: t
nn.Sequential.forward = lambda self, t: t
m.on = not m.on
m.limit = -1
m.limit = None
m.p = 0
m.chunk = 1
m.chunk = 0
m.ff_chunk = lambda x, y=None: x * 2
Main.ff_chunk = lambda self, x, y=None: x * 2
Main.mix = lambda self, x, y=None: x * 2
Main.feed_forward_chunk = lambda self, x, y=None: x * 2
Inner.forward = lambda self, x, y=None, flag=False: x * 2
Inner.count = lambda self: 3
Conv1D.forward = lambda self, x: x * 2
Attention.forward = lambda self, x: x * 2
F.scaled_dot_product_attention = lambda q, k, v, **kwargs: q + k + v
maybe_add_mask = lambda scores, mask=None: scores * 2
apply_chunking_to_forward = lambda f, size, dim, *t: f(*t) * 2
first(m, Attention).scale = 0.1
first(m, Attention).fused_attn = False
first(m, Attention).num_heads = 4
first(m, Attention).gate = nn.Linear(D, D).double()
first(m, Attention).q_norm = nn.LayerNorm(4).double()
first(m, Attention).norm = nn.LayerNorm(D).double()
m.n = 5
m.train()
m.eval()
m.double()
m.float()
m.float(); m.double()
m.to(torch.bfloat16)
m.requires_grad_(False)
m.requires_grad_(True)
m = copy.deepcopy(m)
m = copy.copy(m)
m = pickle.loads(pickle.dumps(m))
m.load_state_dict({{k: v * 0.5 for k, v in m.state_dict().items()}})
m.load_state_dict({{k: v * 0.5 for k, v in m.state_dict().items()}}, assign=True)
m.apply(lambda part: note(type(part).__name__) and None)
HANDLES.append({a}.register_forward_hook(lambda part, given, out: out * 2))
HANDLES.append({a}.register_forward_hook(lambda part, given, out: note(out) and None))
HANDLES.append({a}.register_forward_hook(lambda part, given, out: note(1) and None))
HANDLES.append({a}.register_forward_pre_hook(lambda part, given: (given[0] * 2,)))
HANDLES.append({a}.register_full_backward_hook(lambda part, *grads: note(grads[0][0]) and None))
HANDLES.append({a}.register_full_backward_pre_hook(lambda part, *grads: note(3) and None))
HANDLES.append({l}.weight.register_hook(lambda grad: note(grad) * 2))
HANDLES.append(m.register_forward_hook(lambda part, given, out: note(2) and None))
HANDLES.append(m.register_full_backward_hook(lambda part, *grads: note(2) and None))
HANDLES.append(nn.modules.module.register_module_forward_hook(noting_own))
HANDLES.append(nn.modules.module.register_module_full_backward_hook(noting_own))
HANDLES and HANDLES.pop().remove()
HANDLES and HANDLES.pop(0).remove()
first(m, nn.Sequential).append(Doubled())
first(m, nn.Sequential).append(nn.ReLU())
first(m, nn.Sequential).append(first(m, nn.Sequential)[0])
del first(m, nn.Sequential)[0]
del first(m, nn.Sequential)[-1]
first(m, nn.Sequential)[-1] = nn.Tanh()
first(m, nn.Sequential).insert(0, nn.Linear(D, D).double())
first(m, MLP).act_fn = nn.ReLU()
first(m, MLP).down_proj = Doubled()
first(m, GatedMLP).gate_proj = nn.Linear(D, H).double()
m.probe = lambda t: note(7)
m.added = nn.Linear(D, D)
gc.collect()
other = Main().double(); other.on = False; other.limit = -1
other = copy.deepcopy(m); other(torch.rand(2, 3, D).double())
tops.fuse(m, recompute="none")
tops.fuse(m, recompute="products")
tops.fuse(m, rules=["residual"])
tops.fuse(other)
""".strip().splitlines()

CALLS = """
m(x)
m(x)
m(x)
m(x)
m(x, y)
m(x, y)
m(x=x)
m(x, y=row)
m(x, row)
m(x, scalar)
m(x, column)
m(x, 0.5)
m(x, 0)
m(x, flag=True)
m(x, y, flag=True)
m(x, x)
m.forward(x)
m(m(x))
(m(x), m(x))
m(x.detach())
m(x[0])
m(x[:, :0])
m(x[0, 0])
m(x.transpose(0, 1))
m(x[..., :4])
m(x.float())
m(None)
m(x=x, y=y.float())
functional_call(m, {{k: v.detach() * 2 for k, v in m.named_parameters()}}, (x,))
functional_call(m, {{k: v * 2 for k, v in m.named_parameters()}}, (x, y))
torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)
torch.vmap(m)(x)
m(x, y.long())
m(x, y > 0)
m(x, y.detach())
m(x, nn.Parameter(y.detach()))
m(x.unsqueeze(0))
m(x.expand(2, 2, 3, 8))
m(x[0, 0, 0])
m(x.as_subclass(Tagged))
m(x.flip(0)[::2])
other(x)
torch.func.vjp(m, x)[0]
torch.func.grad(lambda t: m(t).sum())(x)
torch.autograd.grad(m(x).sum(), x, create_graph=True)
torch.autograd.grad(m(x, y).pow(2).sum(), [x, y], create_graph=True, allow_unused=True)
[m(one) for one in (x, x * 2, y)]
Main.forward(m, x)
type(m).forward(m, x)
""".strip().splitlines()
CONTEXTS = ["", "", "", "", "", "", "", "torch.no_grad()", "torch.inference_mode()"]
CONTEXTS += ["torch.autocast('cpu', torch.bfloat16)", "Doubling()", "Noting()"]
CONTEXTS += ["torch.autograd.set_detect_anomaly(True, check_nan=False)"]


def random_edit(rng: random.Random, source: Source) -> str:
    """Statements that edit the model `m`."""
    parts = {kind: list(found) for kind, found in source.parts.items() if found}
    if source.inner and "inner" in parts and rng.random() < 0.5:
        parts = {
            kind: [f"{rng.choice(parts['inner'])}.{name}" for name in found]
            for kind, found in source.inner.parts.items()
        }
    modules = [name for kind, found in parts.items() if kind != "number" for name in found]
    with_weight = [n for kind in ("lin", "up", "down", "both") for n in parts.get(kind, [])]
    numbers = parts.get("number", [])
    norms = parts.get("norm", [])
    while True:
        text = rng.choice(EDITS)
        wanted = {"{a}": modules, "{b}": modules, "{l}": with_weight + norms, "{n}": norms}
        wanted |= {"{s}": numbers, "{t}": numbers}
        if any(mark in text and not names for mark, names in wanted.items()):
            continue
        picked = {mark[1]: rng.choice(names) for mark, names in wanted.items() if names}
        given = {k: name if k in "bt" else f"m.{name}" for k, name in picked.items()}
        if "." in given.get("b", "") or "." in given.get("t", ""):
            given |= {k: given[k].rpartition(".")[2] for k in "bt" if k in given}
            text = text.replace("m.", f"m.{rng.choice(source.parts['inner'])}.", 1)
        return text.format(**given)


def random_call(rng: random.Random) -> tuple[str, str]:
    """A call of the model `m`, and the context that it is in, which may be empty."""
    plain = rng.random() < 0.5
    call = rng.choice(CALLS[:6] if plain else CALLS).replace("{{", "{").replace("}}", "}")
    # A checkpoint runs again where the mode is over.
    return call, rng.choice(CONTEXTS[:7] if "checkpoint" in call else CONTEXTS)
