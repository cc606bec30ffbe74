"""tools/install_packages.py: uv installs, and pip where pip has an index of its own or uv fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import install_packages

ANY = ["--no-deps", "name==1.0"]


@pytest.fixture
def installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> list[list[str]]:
    """The commands that would install; uv is there, and ends with the status of the parameter."""
    commands: list[list[str]] = []
    run = subprocess.run

    def record(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "install" not in command:
            return run(command, **options)
        commands.append(command)
        status = getattr(request, "param", 0) if command[0] == str(install_packages.UV) else 0
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(install_packages, "UV", tmp_path / "uv")
    (tmp_path / "uv").touch()
    monkeypatch.setattr(install_packages.subprocess, "run", record)
    # Settings of this machine's pip must not matter.
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return commands


def programs(commands: list[list[str]]) -> list[str]:
    return ["uv" if command[0].endswith("uv") else "pip" for command in commands]


def test_uv_installs(installed: list[list[str]]) -> None:
    assert install_packages.main(ANY) == 0
    assert programs(installed) == ["uv"]
    assert installed[0][-4:] == ["--python", sys.executable, *ANY]


@pytest.mark.parametrize("installed", [2], indirect=True)
def test_pip_installs_where_uv_fails(installed: list[list[str]]) -> None:
    assert install_packages.main(ANY) == 0
    assert programs(installed) == ["uv", "pip"]
    assert installed[1][-2:] == ANY


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_pip_installs_where_it_has_an_index(
    name: str, installed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "https://packages.example/simple")
    assert install_packages.main(ANY) == 0
    assert programs(installed) == ["pip"]


def test_the_file_of_packages_says_which_uv(installed: list[list[str]], tmp_path: Path) -> None:
    packages = tmp_path / "packages.txt"
    packages.write_text("numpy==2.0.0\nuv==0.1.2\n")
    install_packages.UV.unlink()
    assert install_packages.main(["-r", str(packages)]) == 0
    assert installed[0][-3:] == ["install", "--quiet", "uv==0.1.2"]
    # This uv did not appear, so pip goes on.
    assert programs(installed) == ["pip", "pip"]
