"""Train a small byte-level GPT whose blocks are transformer_ops Sequentials.

python examples/train_lm.py                       Python's reference manual, on CPU
python examples/train_lm.py --backend torch       the same in plain torch.nn
python examples/train_lm.py --compare             both side by side: speed, memory, losses
python examples/train_lm.py --resume out/checkpoint.pt --steps 2000
python examples/train_lm.py --tensor-parallel 2   two processes share each product
torchrun --nproc-per-node 4 examples/train_lm.py --tensor-parallel 2
                                                  and FSDP2 over the two pairs
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lm.failure import Failure, reason

if TYPE_CHECKING:
    from lm.options import Options
    from lm.training import Run


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
    from lm.training import Run

    options, state = parse(arguments)
    if options.compare:
        return compare(options)
    if options.tensor_parallel > 1 and "RANK" not in os.environ:
        return launch(options.tensor_parallel, arguments)
    training = Run(options, state)
    try:
        return train(training, state is not None)
    finally:
        training.ranks.finish()


def train(training: Run, is_resumed: bool) -> int:
    """Train and report, on one process or on several of which the first prints."""
    from lm.report import describe, report

    options, say = training.options, print if training.ranks.is_first else quiet
    make_folder(Path(options.out))
    parameters = sum(p.numel() for p in training.model.parameters())
    text = len(training.corpus.training)
    say(f"{parameters:,} parameters, {text:,} bytes of text, {describe(training)}")
    if is_resumed:
        say(f"resumed {options.resume} after step {training.step}")
    if not training.train():
        say(
            f"interrupted after step {training.step} of {options.steps}; "
            f"to go on: --resume {training.checkpoint}"
        )
        return 130
    try:
        say(f"\n{report(training)}")
    except OSError as error:
        raise Failure(
            f"the loss curve could not be written to {options.out!r}: {reason(error)}"
        ) from error
    return 0


def launch(processes: int, arguments: list[str]) -> int:
    """The same command in so many processes, by torchrun. Returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // processes)))
    command = ["--standalone", f"--nproc-per-node={processes}", __file__, *arguments]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException:
        return 130
    return 0


def quiet(text: str) -> None:
    """What other processes than the first print."""


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
