"""The training loop."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import transformer_ops as tops
from transformer_ops import recipe as recipes

from . import checkpoint
from .data import Batches, Corpus, read_text
from .failure import Failure, reason
from .model import GPT, initialize
from .options import Options
from .parallel import Ranks, load_whole, whole_state, whole_tensors

LN2 = math.log(2)
WARMUP = 50
# The first steps pay for compilation and for memory that is touched for the first time.
UNTIMED_STEPS = 3
RECIPES: dict[str, recipes.Recipe] = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "delayed": recipes.DelayedScaling(),
    "float8-current": recipes.Float8CurrentScaling(),
    "float8-block": recipes.Float8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}


class Run:
    """A model in training, and all that its next losses depend on."""

    def __init__(self, options: Options, state: dict[str, Any] | None = None) -> None:
        self.options = options
        self.device = usable_device(options.device)
        self.corpus = Corpus(read_text(options.data), options.context)
        self.checkpoint = Path(options.out) / "checkpoint.pt"
        self.ranks = Ranks(options.tensor_parallel, self.device)
        self.model = self._new_model()
        initialize(self.model, options.seed)
        self.ranks.split(self.model.to(self.device))
        self.trained: Callable[[Tensor, Tensor], Tensor] = self.model
        if options.compile:
            self.trained = torch.compile(self.model, fullgraph=True)
        self.optimizer = make_optimizer(self.model, options.lr)
        batches = Batches(self.corpus.training, options.batch, options.context, options.seed)
        self.batches = batches
        torch.manual_seed(options.seed)
        self.step = 0
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.tokens_per_second = math.nan
        if state is not None:
            self._restore(state)

    def _new_model(self) -> GPT:
        options = self.options
        return GPT(
            options.backend,
            context=options.context,
            layers=options.layers,
            width=options.width,
            dropout=options.dropout,
            saved=options.saved,
            experts=options.experts,
            top_k=options.top_k,
        )

    # ---- what a checkpoint holds

    def save(self) -> None:
        """Replace the checkpoint by the present state."""
        model, optimizer = whole_state(self.model, self.optimizer)
        if not self.ranks.is_first:
            return
        state = {
            "options": self.options.state(),
            "text": self.corpus.digest,
            "step": self.step,
            "model": model,
            "optimizer": optimizer,
            "data_order": self.batches.generator.get_state(),
            "random": torch.get_rng_state(),
            "losses": self.losses,
            "validation": self.validation,
        }
        if self.device.type == "cuda":
            state["cuda_random"] = torch.cuda.get_rng_state(self.device)
        checkpoint.save(self.checkpoint, state)

    def _restore(self, state: dict[str, Any]) -> None:
        if state["text"] != self.corpus.digest:
            raise Failure("--data must be the text that the checkpoint was trained on, got another")
        load_whole(self.model, self.optimizer, (state["model"], state["optimizer"]))
        self.batches.generator.set_state(state["data_order"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and "cuda_random" in state:
            torch.cuda.set_rng_state(state["cuda_random"], self.device)
        self.step = state["step"]
        self.losses = list(state["losses"])
        self.validation = [(step, bits) for step, bits in state["validation"]]

    # ---- the loop

    def train(self) -> bool:
        """Go on to the last step. False where Ctrl-C ended it before; both leave a checkpoint."""
        options = self.options
        self.model.train()
        timed, seconds = 0, 0.0
        steps = (self.step, options.steps)
        with interruptible() as interrupted, progress(*steps, self.ranks.is_first) as bar:
            for done in range(max(0, options.steps - self.step)):
                start = time.perf_counter()
                bits = self._one_step() / LN2
                if done >= UNTIMED_STEPS:
                    timed += 1
                    seconds += time.perf_counter() - start
                bar.update()
                bar.set_postfix_str(f"{bits:.3f} bits per byte", refresh=False)
                stop = self.ranks.any(interrupted())
                last = self.step == options.steps or stop
                if last or self.step % options.checkpoint_every == 0:
                    if not stop:
                        self.validation.append((self.step, self.validate()))
                    self.save()
                if stop:
                    break
        if timed:
            self.tokens_per_second = timed * options.batch * options.context / seconds
        return self.step >= options.steps

    def _one_step(self) -> float:
        loss = self.loss(*self.batches.draw())
        value = self.ranks.mean(loss.item())
        if not math.isfinite(value):
            raise Failure(f"the loss must be finite, got {value} at step {self.step}; lower --lr")
        self.optimizer.zero_grad(set_to_none=True)
        self.ranks.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options.lr, self.options.decay_steps)
        self.optimizer.step()
        self.step += 1
        self.losses.append(value)
        return value

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this rank's part of a batch in nats a byte, as it is trained on."""
        mine = (self.ranks.part(tensor).to(self.device) for tensor in (inputs, targets))
        with self.autocast():
            return self.trained(*mine)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Products in bfloat16, or of quantized operands, where asked for."""
        options = self.options
        is_low = options.dtype == "bfloat16"
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=is_low),
            tops.autocast(options.recipe != "none", RECIPES.get(options.recipe)),
        ):
            yield

    @torch.no_grad()
    def validate(self) -> float:
        """Bits per byte on the held-out text."""
        model = self.whole_model()
        model.eval()
        total, count = 0.0, 0
        with self.autocast():
            for inputs, targets in self.corpus.validation(16, self.options.context):
                loss = model(inputs.to(self.device), targets.to(self.device))
                total += loss.item() * targets.numel()
                count += targets.numel()
        model.train()
        return total / count / LN2

    def whole_model(self) -> GPT:
        """On this rank alone: a copy with whole parameters, where ranks share the model."""
        if self.ranks.is_alone:
            return self.model
        model = self._new_model()
        model.load_state_dict(whole_tensors(self.model))
        return model.to(self.device)


def usable_device(name: str) -> torch.device:
    """The device of that name; Failure where torch cannot compute on it here."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Failure(
            f"--device must be one that torch can use here, got {name!r}: {reason(error)}"
        ) from error
    return device


def make_optimizer(model: GPT, lr: float) -> torch.optim.AdamW:
    """AdamW that leaves biases and norms out of weight decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=fused)


def learning_rate(step: int, peak: float, decay_steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / max(1, decay_steps - WARMUP))
    return peak * (0.525 + 0.475 * math.cos(math.pi * progress))


def progress(initial: int, total: int, is_shown: bool) -> tqdm:
    """A progress bar in steps."""
    # In a log file every refresh is a line.
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        initial=initial,
        total=total,
        unit="step",
        desc="training",
        dynamic_ncols=True,
        disable=not is_shown,
        mininterval=pause,
        maxinterval=pause,
    )


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a step is never cut; the second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
