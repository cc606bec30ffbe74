"""Fuzzers: random models, dtypes, texts, calls and threads against plain PyTorch.

Each module has `run_seed(seed) -> int`, which makes that many checks and raises AssertionError with
what it ran, and `ISOLATED`: whether a seed may crash or hang, and so runs in a process of its own.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# The fuzzers use the cases and helpers of the tests, which are not a package.
sys.path.append(str(FOLDER.parent))

FUZZERS = tuple(
    sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if "\ndef run_seed(" in path.read_text() and path.stem != "planted"
    )
)
