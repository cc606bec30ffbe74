"""Prints how long each file took to compile, slowest first, from the log of the last build.

python tools/build_times.py            of this interpreter's build folder
python tools/build_times.py --check    exits with 1 if a file was over its budget

A file's time is that of its last compilation: next to nothing where ccache had the answer, which
CCACHE_RECACHE=1 prevents.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from cmake_build import ROOT, build_folder

# Seconds on a busy machine, which are about twice those on an idle one. No file should take longer
# than the aim when nothing else runs.
AIM = 60
BUDGET = 120


def name(source: Path, folder: Path) -> str:
    """From the root of the project; of files compiled as one, all names, else that of what the
    build itself wrote."""
    if not source.is_relative_to(folder):
        return os.path.relpath(source, ROOT)
    if source.parent.name != "Unity" or not source.exists():
        return source.name
    included = re.findall(r'^#include "(.*)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return ", ".join(os.path.relpath(file, ROOT) for file in included)


def compile_times(folder: Path) -> list[tuple[float, str]]:
    """Seconds and source of what the build compiles now, slowest first."""
    commands = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    sources = {folder / entry["output"]: name(Path(entry["file"]), folder) for entry in commands}
    times = {}
    for line in (folder / ".ninja_log").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        start, end, _, output, *_ = line.split("\t")
        if folder / output in sources:
            times[folder / output] = (int(end) - int(start)) / 1000
    return sorted(((seconds, sources[output]) for output, seconds in times.items()), reverse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prints the compile time of each file.")
    parser.add_argument("--folder", type=Path, default=build_folder(), help="of the build")
    parser.add_argument("--check", action="store_true", help="fail where one is over its budget")
    options = parser.parse_args(arguments)
    if not (options.folder / ".ninja_log").exists():
        raise SystemExit(f"[build_times] folder must hold a build, got {options.folder}")
    times = compile_times(options.folder)
    for seconds, source in times:
        print(f"{seconds:7.1f}  {source}")
    total, slow = sum(seconds for seconds, _ in times), sum(seconds > AIM for seconds, _ in times)
    print(f"{total:7.1f}  in all, of {len(times)} files; {slow} took longer than {AIM} s")
    over = [
        f"[build_times] {source} must compile in {BUDGET} s, got {seconds:.1f}"
        for seconds, source in times
        if seconds > BUDGET
    ]
    if options.check and over:
        raise SystemExit("\n".join(over))


if __name__ == "__main__":
    main()
