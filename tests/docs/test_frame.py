"""Files that the forge and other tools read: they parse, and name what is there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    # YAML 1.1 takes the key `on` for a bool, so all scalars stay text.
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


@pytest.mark.parametrize("path", [p for p in FORMS if p.stem != "config"], ids=lambda p: p.stem)
def test_issue_forms(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in form["body"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_checkout_has(path: Path) -> None:
    workflow = read(path)
    assert {"name", "on", "jobs"} <= set(workflow)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["make"]:
                assert f"\n{words[1]}:" in makefile
            if words[:1] == [".ci/run"]:
                assert (ROOT / words[0]).is_file()


def test_hooks_run_tools_of_the_virtual_environment() -> None:
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"  # others are downloaded
    for hook in repo["hooks"]:
        tool, *arguments = shlex.split(hook["entry"])
        assert hook["language"] == "system" and tool.startswith(".venv/bin/")
        files = [word for word in arguments if word.endswith(".py")]
        assert all((ROOT / file).is_file() for file in files)


def test_citation() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
