"""Runs the seeds that the harness writes to it: a process that may crash or hang."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback

from . import __name__ as package


def main(name: str, limit: float) -> None:
    # The answers go to a file that no output of a fuzzer can reach.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    fuzzer = importlib.import_module(f".{name}", package)
    print("ready", file=answers, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            # The harness ends a child that hangs; the stacks say where it hung.
            faulthandler.dump_traceback_later(max(1.0, limit - 2))
            try:
                answer = f"ok {fuzzer.run_seed(int(line))}"
            except Exception:
                print(traceback.format_exc(), file=sys.stderr, flush=True)
                answer = "failed"
            faulthandler.cancel_dump_traceback_later()
            print(answer, file=answers, flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    main(sys.argv[1], float(sys.argv[2]))
