"""Installs packages for the Makefile into the environment of this interpreter.

python tools/install_packages.py -r packages.txt        the file names the version of uv
python tools/install_packages.py --no-deps NAME==1.0

uv downloads and unpacks several packages at a time, which takes a fifth of pip's time. It does not
read pip's settings: where these name an index, such as one of CPU builds of torch, and where uv
fails, pip installs.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
UV = Path(sys.executable).with_name("uv")


def pinned_uv(arguments: list[str]) -> list[str]:
    """What a file of requirements among the arguments says of uv."""
    files = [Path(file) for option, file in pairwise(arguments) if option == "-r"]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.startswith("uv==")]


def pip_has_an_index() -> bool:
    """Whether a file or a variable of the environment tells pip where to look for packages."""
    settings = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    return any("index" in line.partition("=")[0] for line in settings.stdout.splitlines())


def with_uv(arguments: list[str]) -> bool:
    """Whether uv installed the packages."""
    if pip_has_an_index():
        return False
    wanted = [] if UV.exists() else pinned_uv(arguments)
    if wanted and subprocess.run([*PIP, "install", "--quiet", *wanted], check=False).returncode:
        return False
    if not UV.exists():
        return False
    command = [str(UV), "pip", "install", "--native-tls", "--python", sys.executable, *arguments]
    return subprocess.run(command, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    """The exit status of the installer."""
    if with_uv(arguments):
        return 0
    return subprocess.run([*PIP, "install", *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
