"""transformer_ops/_loader.py: which libraries are loaded, and the error where there are none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import transformer_ops as tops
from transformer_ops import _C, _loader

SUFFIX = ".cpython-311-x86_64-linux-gnu.so"
FILES = ("libtransformer_ops.so", f"_C{SUFFIX}", "_build_info.py")
KERNELS = "lib/libtransformer_ops_kernels.so"


def make_package(root: Path, *minors: str, checkout: bool = False) -> Path:
    """A package with empty libraries for these minor versions of torch."""
    package = root / "transformer_ops"
    files = [package / KERNELS] if minors else []
    files += [package / "lib" / f"torch{minor}" / name for minor in minors for name in FILES]
    files += [root / "CMakeLists.txt"] if checkout else []
    package.mkdir(parents=True)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return package


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("2.11.0", "2.11"),
        ("2.15.0+cu132", "2.15"),
        ("2.15.1a0+git0a1b2c", "2.15"),
        ("2.9.1", "2.9"),
        ("3.0.0", "3.0"),
    ],
)
def test_the_folder_for_a_torch(tmp_path: Path, version: str, minor: str) -> None:
    package = make_package(tmp_path, "2.9", "2.11", "2.15", "3.0")
    folder = _loader.find_folder(package, version)
    assert folder == package / "lib" / f"torch{minor}"
    _loader.check_folder(folder, SUFFIX)


SOURCE = "pip install --force-reinstall --no-deps --no-binary transformer-ops transformer-ops"
REINSTALL = "run `pip install --force-reinstall --no-deps transformer-ops`"
EDITABLE = "run `pip install --no-build-isolation -e .` in ROOT"


@pytest.mark.parametrize(
    ("minors", "checkout", "version", "message"),
    [
        (
            ["2.12", "2.9", "2.15"],
            False,
            "2.13.0+cpu",
            "transformer_ops is built for torch 2.9, 2.12 and 2.15, got torch 2.13.0+cpu: run "
            f"`pip install 'torch==2.15.*'`; to build it for torch 2.13, run `{SOURCE}`, which "
            "builds it from source",
        ),
        (
            ["2.15"],
            False,
            "2.10.0",
            "transformer_ops is built for torch 2.15, got torch 2.10.0: run "
            "`pip install 'torch==2.15.*'`; it needs torch 2.11 or newer",
        ),
        (
            ["2.15"],
            True,
            "2.11.0",
            "transformer_ops is built for torch 2.15, got torch 2.11.0: run "
            f"`pip install 'torch==2.15.*'`; to build it for torch 2.11, {EDITABLE}",
        ),
        (
            [],
            True,
            "2.11.0",
            f"transformer_ops is not built in ROOT/transformer_ops: {EDITABLE}, or, if it is "
            "installed elsewhere, start Python in another folder",
        ),
        (
            [],
            False,
            "2.11.0",
            f"transformer_ops in ROOT/transformer_ops is incomplete, got no lib: {REINSTALL}",
        ),
    ],
)
def test_no_folder_for_a_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minors: list[str],
    checkout: bool,
    version: str,
    message: str,
) -> None:
    package = make_package(tmp_path, *minors, checkout=checkout)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError) as error:
        _loader.find_folder(package, version)
    assert str(error.value).replace(str(tmp_path), "ROOT") == message


@pytest.mark.parametrize(
    ("minors", "built"), [([], "not built"), (["2.11"], "built for torch 2.11")]
)
def test_a_checkout_that_hides_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minors: list[str], built: str
) -> None:
    checkout = make_package(tmp_path / "checkout", *minors, checkout=True)
    wheel = make_package(tmp_path / "site-packages", "2.15")
    monkeypatch.setattr(sys, "path", [str(path.parent) for path in (checkout, wheel)])
    with pytest.raises(ImportError) as error:
        _loader.find_folder(checkout, "2.15.0")
    assert str(error.value) == (
        f"transformer_ops in {checkout} is {built}, got torch 2.15.0, and hides the one in "
        f"{wheel}, which has libraries for it: start Python in another folder"
    )
    # The wheel alone works, and so does the checkout where it is built for that torch.
    assert _loader.find_folder(wheel, "2.15.0") == wheel / "lib" / "torch2.15"
    for minor in minors:
        _loader.find_folder(checkout, minor)


@pytest.mark.parametrize("missing", [KERNELS, *(f"lib/torch2.15/{name}" for name in FILES)])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    package = make_package(tmp_path, "2.15")
    (package / missing).unlink()
    with pytest.raises(ImportError) as error:
        _loader.check_folder(package / "lib" / "torch2.15", SUFFIX)
    said = f"transformer_ops in {package} is incomplete, got no {missing}: {REINSTALL}"
    assert str(error.value) == said


def test_another_python_is_named(tmp_path: Path) -> None:
    package = make_package(tmp_path, "2.15")
    other = ".cpython-312-x86_64-linux-gnu.so"
    with pytest.raises(ImportError) as error:
        _loader.check_folder(package / "lib" / "torch2.15", other)
    assert str(error.value) == (
        f"transformer_ops was built for another Python ({SUFFIX}), got {other}: run `{SOURCE}`, "
        "which builds it from source"
    )


def test_another_cuda_is_named() -> None:
    _loader.check_cuda("13.0.1", "13.2")
    with pytest.raises(ImportError, match="was built for CUDA 13, got a torch for CUDA 12: run"):
        _loader.check_cuda("13.0.1", "12.8")


# ---- what the dynamic linker says


def make_library(folder: Path) -> Path:
    library = folder / "libsmall.so"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    text = '#include <unistd.h>\nextern "C" int process() { return getpid(); }'
    subprocess.run(command, input=text, text=True, check=True)
    return library


def message_of(library: Path) -> str:
    with pytest.raises(ImportError) as error:
        _loader.load_library(library)
    return str(error.value)


def cuda_package(root: Path, version: str, *minors: str) -> ModuleType:
    """A transformer_ops_cuda13 with empty libraries for these minor versions of torch."""
    found = ModuleType("transformer_ops_cuda13")
    found.__file__ = str(root / "transformer_ops_cuda13" / "__init__.py")
    found.VERSION = version  # type: ignore[attr-defined]
    for minor in minors:
        file = Path(found.__file__).parent / "lib" / f"torch{minor}" / "libtransformer_ops_cuda.so"
        file.parent.mkdir(parents=True)
        file.touch()
    return found


def test_the_library_of_the_cuda_package(tmp_path: Path) -> None:
    package = cuda_package(tmp_path, "0.1.0", "2.11", "2.15")
    library = _loader.cuda_library(package, "0.1.0", "torch2.15")
    assert library.parent.name == "torch2.15" and library.exists()
    text = (
        "transformer-ops-cuda13 must have the version of transformer_ops, 0.2.0, got 0.1.0: run "
        "`pip install --force-reinstall --no-deps transformer-ops-cuda13==0.2.0`, or uninstall it"
    )
    with pytest.raises(ImportError, match=re.escape(text)):
        _loader.cuda_library(package, "0.2.0", "torch2.15")
    text = (
        "transformer-ops-cuda13 is built for torch 2.11 and 2.15, got torch 2.13: install one of "
        "these, or uninstall it"
    )
    with pytest.raises(ImportError, match=re.escape(text)):
        _loader.cuda_library(package, "0.1.0", "torch2.13")


def test_the_cuda_package_is_found_by_torchs_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _loader.find_cuda_package("13.0") is None
    package = cuda_package(tmp_path, "0.1.0", "2.15")
    assert package.__file__ is not None
    Path(package.__file__).write_text('VERSION = "0.1.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    found = _loader.find_cuda_package("13.2")
    assert found is not None and found.__file__ == package.__file__
    assert _loader.find_cuda_package("12.9") is None
    sys.modules.pop("transformer_ops_cuda13")


def test_an_older_glibc(tmp_path: Path) -> None:
    """A library that asks for a version of glibc that there will not be for long."""
    library = make_library(tmp_path)
    content = library.read_bytes()
    (version,) = set(re.findall(rb"\0(GLIBC_[\d.]+)\0", content))
    wanted = b"GLIBC_9.99".ljust(len(version), b"9")
    library.write_bytes(content.replace(version, wanted))
    here = os.confstr("CS_GNU_LIBC_VERSION")
    assert message_of(library) == (
        f"transformer_ops was built for a newer system, whose glibc has {wanted.decode()}, got "
        f"{here}: {_loader._how_to_build(Path(tops.__file__).parent)}"
    )


def test_an_older_standard_library() -> None:
    text = "/usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by x.so)"
    assert "whose libstdc++ has GLIBCXX_3.4.30, got an older one: run" in (
        _loader.explain_load_error(text)
    )


@pytest.mark.parametrize("keep", [0, 40])
def test_a_damaged_library(tmp_path: Path, keep: int) -> None:
    library = make_library(tmp_path)
    library.write_bytes(library.read_bytes()[:keep])
    said = message_of(library)
    assert "has a damaged library (" in said and str(library) in said


def test_another_error_of_the_linker_is_passed_on() -> None:
    said = _loader.explain_load_error("x.so: undefined symbol: f")
    assert said.startswith("transformer_ops cannot load its libraries (x.so: undefined symbol: f)")


# ---- in processes of their own


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_another_copy_is_loaded_already(tmp_path: Path) -> None:
    """As where an extension was linked to a checkout, and Python finds a wheel."""
    package = Path(tops.__file__).parent
    copy = tmp_path / "lib" / Path(_C.__file__).parent.name / "libtransformer_ops.so"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((Path(_C.__file__).parent / copy.name).read_bytes())
    (tmp_path / KERNELS).symlink_to(package / KERNELS)
    load = "import sys, torch; torch.ops.load_library(sys.argv[1]); import transformer_ops"
    done = run_python(load, str(copy))
    assert done.returncode == 1
    own = Path(_C.__file__).parent / copy.name
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: transformer_ops must be loaded once, got {copy}, which this process has "
        f"loaded before {own}: uninstall"
    )
    # The same copy may be loaded by whoever comes first.
    assert run_python(load, str(own)).returncode == 0


def test_the_smallest_processor_has_kernels() -> None:
    """AVX2 is asked for nowhere: there are kernels for every x86-64, in builds for all of them."""
    if "default" not in _C.processor_levels():
        pytest.skip("built for this machine's instruction set alone")
    code = "import transformer_ops as t; print(t.processor().kernels)"
    done = run_python(code, TRANSFORMER_OPS_ISA="default")
    assert done.stdout == "default\n"
