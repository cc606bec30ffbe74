"""Hands the build over to CMake (tools/cmake_build.py); the metadata is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from cmake_build import WHEEL_FOLDER, CMakeBuild, runtime_requirement

setup(
    ext_modules=[Extension("transformer_ops._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"build": {"build_base": str(WHEEL_FOLDER)}},
    install_requires=[runtime_requirement()],
)
