"""Runs the parts of a make target one after another, the later ones too where one fails.

python tools/run_parts.py --part NAME COMMAND... --part NAME COMMAND...
python tools/run_parts.py --together --part NAME COMMAND... --part NAME COMMAND...

With --together, two parts and more run side by side, as many as there are cores. The output of each
is shown in order, once the parts before it have ended.

The last lines name every part, and every test that pytest, ctest or GoogleTest says failed. Exits
with 1 if any part failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import NamedTuple

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# pytest's short summary; GoogleTest's, such as "[  FAILED  ] Plan.Parses"; and ctest's list, such
# as "  12 - fuser.1 (Failed)".
FAILURES = re.compile(
    r"(?:FAILED|ERROR) \S+.*"
    r"|\[  FAILED  \] [^\s,]+\.[^\s,]+(?:, where .*(?<! ms\)))?"
    r"|\s*\d+ - \S+ \([^()]+\)(?: .*)?"
)


class Outcome(NamedTuple):
    name: str
    status: int
    failures: list[str]


def expanded(command: list[str]) -> list[str]:
    """With files in the place of patterns. An earlier part may have built them."""
    return [name for word in command for name in (glob(word) if "*" in word else []) or [word]]


def show(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def run_part(name: str, command: list[str], pass_on: Callable[[bytes], None] = show) -> Outcome:
    """Passes the output of the command on as it comes; where it is not shown, errors too."""
    environment = {**os.environ, **({"FORCE_COLOR": "1"} if sys.stdout.isatty() else {})}
    try:
        errors = None if pass_on is show else subprocess.STDOUT
        process = subprocess.Popen(
            expanded(command), stdout=subprocess.PIPE, stderr=errors, env=environment
        )
    except OSError as error:
        pass_on(f"{error}\n".encode())
        return Outcome(name, 127, [])
    assert process.stdout is not None
    output = b""
    while chunk := os.read(process.stdout.fileno(), 65536):
        output += chunk
        pass_on(chunk)
    status = process.wait()
    lines = (COLOUR.sub("", line) for line in output.decode(errors="replace").splitlines())
    failures = [line.strip() for line in lines if FAILURES.fullmatch(line)] if status else []
    return Outcome(name, status, failures)


def read_parts(arguments: list[str]) -> list[tuple[str, list[str]]]:
    parts: list[list[str]] = []
    for argument in arguments:
        if argument == "--part":
            parts.append([])
        elif parts:
            parts[-1].append(argument)
        else:
            raise SystemExit(__doc__)
    if not parts or any(len(part) < 2 for part in parts):
        raise SystemExit(__doc__)
    return [(name, command) for name, *command in parts]


def summary(outcomes: list[Outcome]) -> str:
    lines = [""]
    for name, status, failures in outcomes:
        lines.append(f"{name}: " + (f"failed (exit status {status})" if status else "passed"))
        lines += [f"  {failure}" for failure in failures]
    return "\n".join(lines)


def one_by_one(parts: list[tuple[str, list[str]]]) -> Iterator[Outcome]:
    for name, command in parts:
        print(f"== {name}", flush=True)
        yield run_part(name, command)


def together(parts: list[tuple[str, list[str]]]) -> Iterator[Outcome]:
    outputs: list[list[bytes]] = [[] for _ in parts]
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        running = [
            pool.submit(run_part, name, command, output.append)
            for (name, command), output in zip(parts, outputs, strict=True)
        ]
        for (name, _), part, output in zip(parts, running, outputs, strict=True):
            outcome = part.result()
            print(f"== {name}", flush=True)
            show(b"".join(output))
            yield outcome


def main(arguments: list[str]) -> int:
    is_together = arguments[:1] == ["--together"]
    parts = read_parts(arguments[is_together:])
    outcomes = list(together(parts) if is_together else one_by_one(parts))
    print(summary(outcomes))
    return int(any(outcome.status for outcome in outcomes))


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
