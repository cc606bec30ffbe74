"""What formats do to the tensors of a model: noise, underflow, saturation."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..op.base import BasicOperation, FusibleOperation
from ..reports.progress import progress
from ..reports.tables import html_table, text_table
from .number_format import FORMATS
from .recipe import MXFP8BlockScaling, Recipe
from .region import autocast

ROLES = ("input", "weight", "grad_output")
# The largest code as a byte, or a byte of two codes.
_LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B, "int8": 0x7F, "e2m1": 0x77, "nf4": 0xFF}
_quantize = torch.ops.transformer_ops.quantize.default
_dequantize = torch.ops.transformer_ops.dequantize.default


@dataclass(frozen=True)
class Row:
    """One tensor in one format. `signal_to_noise` is in dB, infinite if nothing is lost, and NaN
    for a tensor of zeros. `underflow` is the share of nonzero numbers that become zero; `saturated`
    is the share of numbers above the largest number of their block, which they become."""

    module: str
    role: str
    format: str
    signal_to_noise: float
    underflow: float
    saturated: float
    is_recipe: bool  # the format is that of the recipe, not one to compare with


@dataclass(frozen=True)
class Report:
    """Rows by module, role and format: as text, as a table in a notebook, and as a picture. `*`
    marks the format of the recipe."""

    rows: tuple[Row, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each row."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        head, *lines = text_table([_HEAD[1:], *(_cells(row)[1:] for row in self.rows)], indent="  ")
        found, module = [head], ""
        for row, line in zip(self.rows, lines, strict=True):
            if row.module != module:
                module = row.module
                found.append(module)
            found.append(line)
        return "\n".join(found)

    def _repr_html_(self) -> str:
        return html_table(_HEAD, map(_cells, self.rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves a picture of the signal-to-noise ratios with matplotlib, in the format of the
        suffix."""
        from matplotlib.figure import Figure

        places = list(dict.fromkeys((row.module, row.role) for row in self.rows))
        formats = list(dict.fromkeys(row.format for row in self.rows))
        figure = Figure(figsize=(8, 1.5 + 0.3 * len(places)), layout="constrained")
        axes = figure.subplots()
        for format in formats:
            rows = [row for row in self.rows if row.format == format]
            found = [row for row in rows if math.isfinite(row.signal_to_noise)]
            heights = [places.index((row.module, row.role)) for row in found]
            axes.plot([row.signal_to_noise for row in found], heights, "o", label=format)
        axes.set_yticks(range(len(places)), [f"{name} {role}" for name, role in places])
        axes.invert_yaxis()
        axes.set_xlabel("signal-to-noise ratio, dB")
        axes.grid(alpha=0.3)
        axes.legend(title="format", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path)


_HEAD = ("module", "tensor", "format", "SNR dB", "underflow", "saturated")


def _cells(row: Row) -> tuple[str, ...]:
    format = row.format + (" *" if row.is_recipe else "")
    return (
        row.module,
        row.role,
        format,
        f"{row.signal_to_noise:.1f}",
        f"{row.underflow:.2%}",
        f"{row.saturated:.2%}",
    )


def report(
    model: nn.Module,
    *inputs: Any,
    recipe: Recipe | None = None,
    formats: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> Report:
    """Runs forward and backward once, and reports what formats do to the operands of each product.

    Args:
        model: a model with products of this package: `Linear`, `BasicLinear`, `PackedLinear` or
            `GroupedLinear`. Several weights of one op are one row.
        inputs, kwargs: the arguments of the model.
        recipe: the recipe of the run, whose formats are reported and marked with `*`; None for
            `MXFP8BlockScaling()`.
        formats: other formats of `torch.ops.transformer_ops.quantize` to compare with.
        loss: computes a scalar from the model's result. By default a scalar output is the loss
            itself, and for another tensor the loss is the mean of its squares.

    Parameters get no gradients; buffers and random numbers change as in any call.

    Raises:
        ValueError: the model has no such product, or has one that none of its calls reached.
        TypeError: the output is no tensor, and there is no `loss`.
        RuntimeError: a format is unknown.
    """
    recipe = recipe or MXFP8BlockScaling()
    products = _products(model)
    if not products:
        raise ValueError(
            "[report] model must have a Linear, PackedLinear or GroupedLinear of transformer_ops"
        )
    seen: dict[tuple[str, str], list[Tensor]] = {}
    with _watched(products, seen):
        with autocast(recipe=recipe):
            output = model(*inputs, **kwargs)
        value = _loss_of(output) if loss is None else loss(output)
        wanted = [p for p in model.parameters() if p.requires_grad]
        if value.requires_grad and wanted:
            torch.autograd.grad(value, wanted, allow_unused=True)
    if not seen:
        raise ValueError("[report] model must call one of its products, got none that ran")
    rows = []
    with progress("formats", len(products), "product") as advance:
        for name, (_, op) in products.items():
            for role, own in zip(ROLES, recipe.operands_of(op), strict=True):
                tensors = seen.get((name, role))
                if tensors is None:
                    continue
                for format in dict.fromkeys((own, *formats)):
                    if format != "exact":
                        noise = measure(tensors, format)
                        rows.append(Row(name, role, format, *noise, is_recipe=format == own))
            advance()
    return Report(tuple(rows))


def _products(model: nn.Module) -> dict[str, tuple[nn.Module, BasicOperation]]:
    """By name: the module that is called, and the op in it that a recipe quantizes."""
    found: dict[str, tuple[nn.Module, BasicOperation]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FusibleOperation) or module.is_fused_op:
            continue
        for op in module.basic_ops:
            if not op.is_python and "weight" in op._declaration()["operands"]:
                found[name or type(module).__name__] = (module, op)
    return found


@contextlib.contextmanager
def _watched(
    products: dict[str, tuple[nn.Module, BasicOperation]], seen: dict[tuple[str, str], list[Tensor]]
) -> Iterator[None]:
    handles = []
    for name, (module, op) in products.items():

        def before(module: nn.Module, args: Any, name: str = name, op: BasicOperation = op) -> None:
            seen[name, "input"] = [args[0].detach()]
            weights = op._parameter_tensors()[: len(op._names_in("weight"))]
            seen[name, "weight"] = [weight.detach() for weight in weights]

        def after(module: nn.Module, grads: Any, name: str = name) -> None:
            if grads[0] is not None:
                seen[name, "grad_output"] = [grads[0].detach()]

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_full_backward_pre_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _loss_of(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"[report] loss must be given where the model returns no tensor, got {output!r}"
        )
    return output if output.dim() == 0 else output.float().square().mean()


def measure(tensors: Sequence[Tensor], format: str) -> tuple[float, float, float]:
    """The signal-to-noise ratio in dB, and the shares that underflow and saturate, of tensors that
    are rounded one by one."""
    found = []
    for tensor in tensors:
        codes, scale = _quantize(tensor, format)
        found.append(errors_of(tensor, codes, scale, format))
    return Errors(*map(sum, zip(*found, strict=True))).summary()


class Errors(NamedTuple):
    """Sums over the numbers of tensors that are rounded."""

    signal: float = 0.0
    noise: float = 0.0
    nonzero: int = 0
    lost: int = 0
    clipped: int = 0

    def summary(self) -> tuple[float, float, float]:
        """The signal-to-noise ratio in dB, and the shares that underflow and saturate."""
        signal, noise, nonzero = self.signal, self.noise, max(1, self.nonzero)
        ratio = math.nan
        if signal != 0:
            ratio = math.inf if noise == 0 else 10 * math.log10(signal / noise)
        return ratio, self.lost / nonzero, self.clipped / nonzero


def errors_of(tensor: Tensor, codes: Tensor, scale: Tensor, format: str) -> Errors:
    """Compares a tensor with its codes and scales in a format."""
    dtype = "float64" if tensor.dtype is torch.float64 else "float32"
    signal = noise = 0.0
    nonzero = lost = clipped = 0
    # In parts, because temporary numbers of double precision take more memory than the tensor.
    back = _dequantize(codes, scale, format, dtype, tensor.shape)
    for exact, rounded in _parts(tensor, back):
        signal += float(exact.double().square().sum())
        noise += float((exact.to(rounded.dtype) - rounded).double().square().sum())
        nonzero += int(exact.count_nonzero())
        lost += int(((rounded == 0) & (exact != 0)).sum())
    del back, rounded
    most = torch.empty_like(codes)
    most.view(torch.uint8).fill_(_LARGEST_CODE[FORMATS[format].element])
    largest = _dequantize(most, scale, format, dtype, tensor.shape)
    for exact, bound in _parts(tensor, largest):
        clipped += int((exact.abs() > bound).sum())
    return Errors(signal, noise, nonzero, lost, clipped)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.reshape(-1).split(1 << 20) for tensor in tensors), strict=True)
