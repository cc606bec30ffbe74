"""Train a small byte-level GPT whose blocks are transformer_ops Sequentials.

python examples/train_lm.py                       Python's reference manual, on CPU
python examples/train_lm.py --backend torch       the same in plain torch.nn
python examples/train_lm.py --compare             both side by side: speed, memory, losses
python examples/train_lm.py --resume out/checkpoint.pt --steps 2000
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lm.failure import Failure, reason

if TYPE_CHECKING:
    from lm.options import Options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except Failure as failure:
        print(f"train_lm.py: {failure}", file=sys.stderr)
        return 2


def run(arguments: list[str]) -> int:
    """Train and report, or raise Failure."""
    check_packages()
    from lm.options import parse
    from lm.report import describe, report
    from lm.training import Run

    options, state = parse(arguments)
    if options.compare:
        return compare(options)
    training = Run(options, state)
    make_folder(Path(options.out))
    parameters = sum(p.numel() for p in training.model.parameters())
    text = len(training.corpus.training)
    print(f"{parameters:,} parameters, {text:,} bytes of text, {describe(training)}")
    if state is not None:
        print(f"resumed {options.resume} after step {training.step}")
    if not training.train():
        print(
            f"interrupted after step {training.step} of {options.steps}; "
            f"to go on: --resume {training.checkpoint}"
        )
        return 130
    try:
        print(f"\n{report(training)}")
    except OSError as error:
        raise Failure(
            f"the loss curve could not be written to {options.out!r}: {reason(error)}"
        ) from error
    return 0


def compare(options: Options) -> int:
    """Train both backends side by side and report, or raise Failure."""
    from lm.compare import OURS, Comparison
    from lm.report import settings

    both = Comparison(options)
    make_folder(Path(options.out))
    run = both.runs[OURS]
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{parameters:,} parameters, both backends{settings(run)}")
    whole = both.train()
    if not whole:
        print(f"interrupted after step {both.step} of {options.steps}")
    try:
        print(f"\n{both.report()}")
    except OSError as error:
        raise Failure(
            f"the steps could not be written to {options.out!r}: {reason(error)}"
        ) from error
    return 0 if whole else 130


def check_packages() -> None:
    """Before minutes of training, not after them."""
    try:
        import matplotlib  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError as error:
        raise Failure(
            f"needs {error.name}: pip install matplotlib tqdm, the [examples] extra"
        ) from error


def make_folder(path: Path) -> None:
    """The --out folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(
            f"--out must be a folder that can be written, got {str(path)!r}: {reason(error)}"
        ) from error


if __name__ == "__main__":
    # Before torch is loaded. On cores shared with other programs, threads that wait by spinning
    # make a step ten times as slow; on free ones the difference is small.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
