"""PEP 517 backend: setuptools, with torch at the version that the target environment has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

from cmake_build import OLDEST_TORCH, ROOT, WHEEL_FOLDER
from setuptools import __version__ as setuptools_version
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

OLDEST_SETUPTOOLS = "77.0.3"
if int(setuptools_version.partition(".")[0]) < int(OLDEST_SETUPTOOLS.partition(".")[0]):
    raise SystemExit(
        f"transformer_ops needs setuptools >= {OLDEST_SETUPTOOLS} to build, "
        f"got {setuptools_version}: pip install 'setuptools>={OLDEST_SETUPTOOLS},<82'"
    )


def target_torch() -> str:
    """pip shows an isolated build its own packages only, through PYTHONPATH: -E looks past it."""
    command = "from importlib.metadata import version; print(version('torch'))"
    answer = subprocess.run(
        [sys.executable, "-E", "-c", command], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        return f"torch>={OLDEST_TORCH}"
    return f"torch=={answer.stdout.strip().partition('+')[0]}"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    inherited = build_meta.get_requires_for_build_wheel(config_settings)
    return [*inherited, target_torch(), "cmake>=3.18", "ninja"]


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory: str, *args: Any, **kwargs: Any) -> str:
    # setuptools would put modules deleted since the last build into the wheel.
    shutil.rmtree(ROOT / WHEEL_FOLDER, ignore_errors=True)
    return build_meta.build_wheel(wheel_directory, *args, **kwargs)
