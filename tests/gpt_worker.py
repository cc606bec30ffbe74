"""What several gloo processes run for `test_distributed.py`: the GPT of examples/train_lm.py with
tensor and sequence parallelism and FSDP2, compared with `one_process`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import transformer_ops as tops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lm.model import GPT, initialize
from lm.parallel import Ranks
from lm.training import make_optimizer

WIDTH, CONTEXT, BATCH = 64, 8, 8
STEPS = 20
SAVED_AT, RESUMED = 10, 5


def make_gpt() -> GPT:
    """A block with GELU, and one with SwiGLU."""
    model = GPT("tops", context=CONTEXT, layers=2, width=WIDTH, dropout=0.0)
    gated: Any = model.blocks[1]
    parts = dict(gated.mlp.named_children())
    parts["gelu"] = tops.SwiGLU(glu_interleave_size=16)
    parts["down"] = tops.Linear(2 * WIDTH, WIDTH)
    gated.mlp = tops.Residual(parts)
    # AdamW divides a gradient by its size: in float32, the smallest steps would be rounding errors.
    model.double()
    initialize(model, 0)
    return model


class Training:
    """A model, its optimizer and the ranks that train it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.model = make_gpt()
        ranks.split(self.model)
        self.optimizer = make_optimizer(self.model, 1e-3)

    def run(self, steps: range) -> tuple[Tensor, Tensor]:
        """Losses, as means over all windows, and norms of all gradients."""
        losses, norms = [], []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            windows = torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)
            mine = self.ranks.part(windows)
            self.optimizer.zero_grad()
            loss = self.model(mine[:, :-1], mine[:, 1:])
            self.ranks.backward(loss)
            norms.append(full(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)).item())
            self.optimizer.step()
            losses.append(self.ranks.mean(loss.item()))
        double = torch.float64
        return torch.tensor(losses, dtype=double), torch.tensor(norms, dtype=double)

    def state(self) -> dict[str, Any]:
        """The state that DCP saves and loads."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def resume(self, folder: str) -> None:
        """Resumes from a checkpoint of any number of ranks."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=self.ranks.is_alone)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def one_process() -> dict[str, Any]:
    """The losses, norms and parameters of a run on one process."""
    training = Training(Ranks(1, torch.device("cpu")))
    losses, norms = training.run(range(STEPS))
    parameters = {name: p.detach() for name, p in training.model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def close(got: Tensor, want: Tensor, name: str = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def check_resumed(ranks: Ranks, folder: Path) -> None:
    """Checks the losses, and the norms of gradients, after a checkpoint of four ranks."""
    want = torch.load(folder / "one_process.pt")
    training = Training(ranks)
    training.resume(str(folder / "checkpoint"))
    steps = range(SAVED_AT, SAVED_AT + RESUMED)
    for name, found in zip(("losses", "norms"), training.run(steps), strict=True):
        close(found, want[name][steps.start : steps.stop], name)


def check(folder: Path) -> None:
    """Four ranks train as one process does, and save; two ranks resume."""
    size = dist.get_world_size()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(size))
    ranks = Ranks(2, torch.device("cpu"))
    if size == 2:
        check_resumed(ranks, folder)
        return
    want = torch.load(folder / "one_process.pt")
    training = Training(ranks)
    assert all(
        isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in training.model.parameters()
    )
    losses, norms = training.run(range(SAVED_AT))
    dcp.save(training.state(), checkpoint_id=str(folder / "checkpoint"))
    more_losses, more_norms = training.run(range(SAVED_AT, STEPS))
    close(torch.cat([losses, more_losses]), want["losses"])
    close(torch.cat([norms, more_norms]), want["norms"])
    for name, parameter in training.model.named_parameters():
        close(full(parameter.detach()), want["parameters"][name], name)
