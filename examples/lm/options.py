"""The command line."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from . import checkpoint
from .failure import Failure

# A checkpoint fits only the run that has these in common with it.
FIXED = ("layers", "width", "context", "seed", "batch", "experts", "top_k")
RECIPES = ("mxfp8", "delayed", "float8-current", "float8-block", "nvfp4")


@dataclass(frozen=True)
class Options:
    """What a run is made of; a checkpoint keeps it."""

    data: str | None
    steps: int
    batch: int
    context: int
    layers: int
    width: int
    dropout: float
    lr: float
    decay_steps: int
    dtype: str
    device: str
    backend: str
    compile: bool
    seed: int
    out: str
    saved: str = "exact"
    recipe: str = "none"
    experts: int = 0
    top_k: int = 2
    tensor_parallel: int = 1
    checkpoint_every: int = 200
    resume: str | None = None
    compare: bool = False

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint."""
        state = asdict(self)
        # Any number of processes may go on from it.
        del state["resume"], state["compare"], state["tensor_parallel"]
        return state


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(message)


def parse(arguments: list[str]) -> tuple[Options, dict[str, Any] | None]:
    """Options, and the checkpoint to go on from, whose options are the defaults then."""
    parser = _make_parser()
    given = vars(parser.parse_args(arguments))
    options = _checked(Options(**given))
    if options.compare and options.resume is not None:
        raise Failure(f"--compare must start afresh, got --resume {options.resume!r}")
    if options.compare and "checkpoint_every" in given:
        raise Failure(
            "--compare writes no checkpoint, so that --checkpoint-every must be absent, "
            f"got {options.checkpoint_every}"
        )
    if options.resume is None:
        return options, None
    state = checkpoint.load(options.resume)
    saved = Options(**state["options"])
    parser.set_defaults(**saved.state())
    options = _checked(Options(**vars(parser.parse_args(arguments))))
    for name in FIXED:
        want, got = getattr(saved, name), getattr(options, name)
        if got != want:
            flag = name.replace("_", "-")
            raise Failure(f"--{flag} must be that of the checkpoint, {want}, got {got}")
    return options, state


def _checked(options: Options) -> Options:
    if options.saved != "exact" and options.backend == "torch":
        raise Failure(f"--saved must be exact with --backend torch, got {options.saved}")
    if options.recipe != "none" and options.backend == "torch":
        raise Failure(f"--recipe must be none with --backend torch, got {options.recipe}")
    if options.experts and options.top_k > options.experts:
        raise Failure(f"--top-k must be at most --experts, {options.experts}, got {options.top_k}")
    if options.tensor_parallel > 1 or "RANK" in os.environ:
        _check_parallel(options)
    return options


def _check_parallel(options: Options) -> None:
    wanted = {"backend": "tops", "dropout": 0.0, "experts": 0, "compile": False, "compare": False}
    for name, value in wanted.items():
        got = getattr(options, name)
        if got != value:
            must = "be absent" if value is False else f"be {value}"
            shown = "" if value is False else f", got {got}"
            raise Failure(f"--{name} must {must} where processes share a model{shown}")
    ranks = options.tensor_parallel
    heads = options.width // math.gcd(options.width, 32)
    if heads % ranks:
        raise Failure(f"--tensor-parallel must divide the {heads} heads of --width, got {ranks}")
    count = int(os.environ.get("WORLD_SIZE", ranks))
    if count % ranks:
        raise Failure(f"--tensor-parallel must divide the {count} processes, got {ranks}")
    if options.batch % count:
        raise Failure(f"--batch must be divisible by the {count} processes, got {options.batch}")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_lm.py",
        description="Train a small byte-level GPT on text.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", metavar="FILE_OR_FOLDER", help="text (default: Python's reference manual)")
    add("--steps", type=_size, default=1200, help="steps to reach, those before --resume included")
    add("--batch", type=_size, default=8, help="windows a step")
    add("--context", type=_size, default=128, help="bytes a window")
    add("--layers", type=_size, default=4, help="blocks")
    add("--width", type=_size, default=128, help="hidden size; heads have gcd(width, 32) elements")
    add("--dropout", type=_probability, default=0.0, help="in both branches of a block")
    add("--lr", type=_positive, default=4e-3, help="peak learning rate of AdamW")
    # Not --steps: a run of more steps then goes on exactly where a shorter one ended.
    add("--decay-steps", type=_size, default=1200, help="step at which the cosine ends, at lr / 20")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16: autocast, with float32 parameters")  # fmt: skip
    add("--device", default="cpu", help="as torch names it")
    backend = parser.add_mutually_exclusive_group().add_argument
    backend("--backend", choices=("tops", "torch"), default="tops",
        help="torch: the same model in plain torch.nn, with the same initial weights")  # fmt: skip
    backend("--compare", action="store_true", default=False,
        help="train both, step by step in turn, and compare; writes no checkpoint")  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction, default=False,
        help="train through torch.compile(fullgraph=True)")  # fmt: skip
    add("--saved", choices=("exact", "fp8", "int8"), default="exact",
        help="how blocks keep what backward reads; with --backend tops")  # fmt: skip
    add("--recipe", choices=("none", *RECIPES), default="none",
        help="formats in which products take their operands; with --backend tops")  # fmt: skip
    add("--experts", type=_size, default=0,
        help="a mixture of so many experts in place of each block's MLP")  # fmt: skip
    add("--top-k", type=_size, default=2, help="experts of a byte")
    add("--tensor-parallel", type=_size, default=1,
        help="processes that share each product; FSDP2 takes the others of torchrun")  # fmt: skip
    add("--seed", type=_seed, default=0, help="of weights, data order and dropout")
    add("--checkpoint-every", type=_size, default=argparse.SUPPRESS,
        help=f"steps between checkpoints (default: {Options.checkpoint_every})")  # fmt: skip
    add("--out", default="out", help="folder for checkpoint, losses and loss curve")
    add("--resume", metavar="FILE", help="go on from a checkpoint, with its options as defaults")
    return parser


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be in [0, 2**63), got {value}")
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {value}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {value}")
    return value
