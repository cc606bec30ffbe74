"""`fuse`: ops in place of parts of whole models.

In: a model. Out: the same model, in which some modules have a new class, and a report. Each class
goes through these modules:

    windows     consecutive statements of `forward` that compute one value
    sites       those that a rule of `rules` matches (`pattern` compares their expressions)
    parts       ops for the steps in them: `self.up(y)` becomes a view of a Linear
    rewriting   the method, with `region(x)` in place of the statements
    fused_class a subclass with that method
    region      one for each module and site: runs the ops while all that the statements read is as
                it was (`facts`), else the statements

With the statements

    y = self.down(self.act(self.up(self.norm(x))))
    x = x + y

the rule "residual" gives MakeExtraOutput, LayerNorm, Linear, GELU, Linear, AddExtraInput.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from torch import nn

from ..modules.sequential import Sequential
from ..op.base import FusibleOperation
from ..runtime.policies import Policies
from .fused_class import FusedModule, fused_class
from .region import set_recompute
from .report import FuseReport, FuseRow
from .rules import FuseRule, FuseSkip, rules_named
from .sites import Site, blocked_sites, find_sites

__all__ = ["fuse"]


def fuse(
    model: nn.Module,
    only: str | Iterable[str] | None = None,
    rules: Iterable[str | FuseRule] | None = None,
    strict: bool = False,
    *,
    recompute: str = "cheap",
) -> FuseReport:
    """Has fused ops run parts of a model that was written with torch's modules, in place.

    Nothing is replaced: every module, parameter and name stays, and so do state dict, tied weights,
    optimizers and hooks. A module whose `forward` has statements that a rule knows gets a subclass
    of its class, in which ops run in place of these statements. The ops read parameters and
    attributes from the modules that the statements call. The statements themselves run where
    anything about these modules is not as the rule knows it: hooks, a `forward` of its own, another
    class (adapters), parameters of another class (quantizers, DTensor); and in `torch.export`.

    Call it before `DistributedDataParallel`, and before or after `fully_shard`, `torch.compile` and
    adapters. Calling it again fuses modules that are not fused yet, and sets `recompute` for all.
    The rules that fused a module stay.

    Args:
        model: of any class.
        only: names of modules, as of `named_modules()`, with wildcards: `"model.layers.*"`.
        rules: the rules to use, or their names; None for all.
        strict: raise if nothing is fused.
        recompute: what backward recomputes, as in `Sequential`. "products" saves the fewest bytes,
            and computes the outputs of most linear layers twice. A call sets it for the modules
            that `only` selects; a later call may set it for some of them.

    Returns:
        What was fused, and what was not and why. `print` shows it.

    Raises:
        TypeError: `model` is no module.
        ValueError: `rules` has an unknown name; `recompute` has another value; with `strict`,
            nothing was fused.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"[fuse] model must be an nn.Module, got {type(model).__name__}")
    Policies(recompute=recompute).checked("fuse")
    chosen = rules_named(rules)
    skipped: list[FuseRow] = []
    covered: set[int] = set()
    candidates = list(_candidates(model, only))
    for path, module in candidates:
        if id(module) in covered:
            continue
        base = type(module)
        sites = () if isinstance(module, FusedModule) else find_sites(module, chosen)
        why = _swap_class(module, sites) if sites else ""
        fused = module._tops_sites if isinstance(module, FusedModule) else ()
        skipped += [
            FuseRow(path, base.__name__, site.rule.name, site.found.window.obstacle)
            for site in blocked_sites(module, chosen, fused)
        ]
        if why:
            skipped += [
                FuseRow(path, base.__name__, site.rule.name, why)
                for site in sites
                if site.region().may_run(module)
            ]
        elif isinstance(module, FusedModule):
            # Whether attention runs as an op depends on the call; if not, its parts are called.
            always = [
                region
                for site, region in zip(module._tops_sites, module._regions(), strict=True)
                if site.arguments is None
            ]
            covered.update(id(one) for region in always for one in region.covered(module))
    for _, module in candidates:
        if isinstance(module, FusedModule):
            set_recompute(module, recompute)
    report = FuseReport(model, skipped)
    if strict and not report.fused:
        raise ValueError(f"[fuse] model must have a part that a rule fuses, got {report}")
    return report


def _swap_class(module: nn.Module, sites: tuple[Site, ...]) -> str:
    """Gives the module the class with these sites, or says why it cannot have one."""
    if "forward" in vars(module):
        return "it has a forward of its own"
    try:
        module.__class__ = fused_class(type(module), sites)
    except TypeError as error:
        return f"its class cannot change: {error}"
    except FuseSkip as skip:
        return str(skip)
    return ""


def _candidates(
    model: nn.Module, only: str | Iterable[str] | None
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a rule may fuse, by name."""
    wanted = None if only is None else [only] if isinstance(only, str) else list(only)
    for path, module in list(model.named_modules()):
        if isinstance(module, FusibleOperation | Sequential):
            continue
        if wanted is None or any(fnmatch.fnmatchcase(path, pattern) for pattern in wanted):
            yield path, module
