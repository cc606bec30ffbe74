"""Which scale an FP8 weight should get when it is written: bits per byte of the example GPT.

    python benchmarks/weight_scales.py [--seeds N] [--steps N]

Trains the model with weights held as E4M3 codes with one scale, under DelayedScaling: with the
scale that a QuantizedTensor makes, with a power of two at each write, and with the delayed scale
that te.ops writes by. Each runs without master weights, where optimizer steps below half a code are
lost, and with them. Prints the mean over the seeds, and the mean difference from the first way with
its standard error. A training takes about 20 s on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

import transformer_ops as tops
from transformer_ops import QuantizedTensor
from transformer_ops.recipe import CustomRecipe, Float8CurrentScaling, Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lm.model import GPT
from lm.options import parse
from lm.training import Run

LARGEST = 448.0
AS_IT_IS, POWER_OF_TWO, DELAYED = "as it is", "power of two", "delayed"
FORMATS: dict[str, Recipe] = {
    AS_IT_IS: Float8CurrentScaling(),
    POWER_OF_TWO: CustomRecipe(lambda role: "e4m3 pow2" if role.tensor_type == "weight" else None),
    DELAYED: Float8CurrentScaling(),
}


class Delayed:
    """Writes each weight by a scale that follows from the magnitudes of earlier writes."""

    def __init__(self) -> None:
        self.largest: dict[int, float] = {}

    def take(self, tensor: QuantizedTensor, source: Tensor) -> None:
        """In place of `QuantizedTensor._take`."""
        key = tensor.codes.data_ptr()
        scale = LARGEST / self.largest[key] if key in self.largest else 1.0
        numbers = source.to(tensor.dtype).expand(tensor.shape).contiguous()
        rounded, amax = torch.ops.transformer_ops.quantize_dequantize_scaled(
            numbers, torch.full((3,), scale), 0, "e4m3", "float32"
        )
        tensor.codes.copy_((rounded * scale).to(tensor.codes.dtype))
        tensor.scale.fill_(1 / scale)
        if amax > 0:
            self.largest[key] = max(self.largest.get(key, 0.0), amax.item())


@contextlib.contextmanager
def written_by(way: str) -> Iterator[None]:
    """Within this, weights are written in that way."""
    before = QuantizedTensor._take
    if way == DELAYED:
        state = Delayed()
        QuantizedTensor._take = lambda self, source: state.take(self, source)  # type: ignore[method-assign]
    try:
        yield
    finally:
        QuantizedTensor._take = before  # type: ignore[method-assign]


class QuantizedRun(Run):
    """A training with quantized weights, which writes no checkpoints."""

    def __init__(self, way: str, seed: int, steps: int, masters: bool, out: str) -> None:
        self.way = way
        text = f"--steps {steps} --decay-steps {steps} --dtype bfloat16 --recipe delayed"
        super().__init__(parse([*text.split(), "--seed", str(seed), "--out", out])[0])
        if masters:
            self._keep_masters()

    def _new_model(self) -> GPT:
        with tops.quantized_model_init(recipe=FORMATS[self.way]):
            return super()._new_model()

    def _keep_masters(self) -> None:
        """Has the optimizer step float32 copies, and writes those into the weights."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for group in self.optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                if isinstance(weight, QuantizedTensor):
                    group["params"][i] = torch.nn.Parameter(weight.detach().dequantize().float())
                    pairs.append((group["params"][i], weight))
        step: Callable[..., Any] = self.optimizer.step

        def step_masters() -> None:
            for master, weight in pairs:
                assert weight.grad is not None
                master.grad = weight.grad.float()
            step()
            with torch.no_grad():
                for master, weight in pairs:
                    weight.copy_(master)
                    weight.grad = None

        self.optimizer.step = step_masters  # type: ignore[assignment, method-assign]

    def save(self) -> None:
        """Nothing to go on from."""


def bits_per_byte(way: str, seed: int, steps: int, masters: bool) -> float:
    """On the held-out text, at the end of a training."""
    with tempfile.TemporaryDirectory() as folder, written_by(way):
        run = QuantizedRun(way, seed, steps, masters, folder)
        run.train()
        return run.validation[-1][1]


def main() -> None:
    """Trains, and prints a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    for masters in (False, True):
        print("with master weights" if masters else "without master weights", flush=True)
        found: dict[str, list[float]] = {}
        for way in FORMATS:
            found[way] = [
                bits_per_byte(way, seed, options.steps, masters) for seed in range(options.seeds)
            ]
            pairs = zip(found[way], found[AS_IT_IS], strict=True)
            more = [a - b for a, b in pairs]
            spread = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            print(
                f"  {way:<14}{statistics.mean(found[way]):.3f} bits per byte, "
                f"{statistics.mean(more):+.3f} ± {spread:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
