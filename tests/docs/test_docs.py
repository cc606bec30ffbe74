"""The Python blocks of README.md and docs/ run, and print what the pages say.

`python tests/docs/test_docs.py` writes what they print now into the pages.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"<!-- output -->\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A report names lines of the page, which move.
LINE = re.compile(r"in line\s+\d+")


def run(page: Path) -> list[tuple[re.Match, str]]:
    """The outputs a page shows, each with what the block before it printed."""
    text = page.read_text(encoding="utf-8")
    shown = list(OUTPUT.finditer(text))
    namespace = {"__name__": page.stem}
    pairs = []
    blocks = list(CODE.finditer(text))
    for i, block in enumerate(blocks):
        printed = io.StringIO()
        # Line numbers of the page in a traceback.
        source = "\n" * text[: block.start(1)].count("\n") + block[1]
        with contextlib.redirect_stdout(printed):
            exec(compile(source, page, "exec"), namespace)
        end = blocks[i + 1].start() if i + 1 < len(blocks) else len(text)
        pairs += [(s, printed.getvalue()) for s in shown if block.end() < s.start() < end]
    return pairs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks(page):
    for shown, printed in run(page):
        found, wanted = (LINE.sub("in line", text) for text in (printed, shown[1]))
        assert found == wanted


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("quantization.md", "A write through `weight.data` or numpy is not noticed"),
        ("differences.md", "`RMSNorm(n)` has `eps=1e-5`"),
        ("differences.md", "At exactly the limit of a clamped unit"),
    ],
)
def test_a_page_says_what_users_met(page, sentence):
    assert sentence in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_a_first_fusion_is_short():
    """Forward, backward, registration and check."""
    code = CODE.findall((ROOT / "docs" / "first-fusion.md").read_text(encoding="utf-8"))
    (written,) = (block for block in code if block.startswith("class LinearSiLU"))
    (checked,) = (block for block in code if block.startswith("PATTERN"))
    (registered,) = (block for block in code if block.startswith("handle"))
    lines = [*written.splitlines(), *checked.splitlines(), registered.splitlines()[0]]
    assert len([line for line in lines if line and "print" not in line]) <= 20


@pytest.mark.parametrize("page", ["README.md", "docs/models.md", "docs/adapters.md"])
def test_reports_as_printed(page):
    """The rows of a fused model that no processor changes: some run our products, others do not."""
    text = (ROOT / page).read_text(encoding="utf-8")
    first = CODE.search(text)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(first + "\nprint(report)", page, "exec"), {})
    (shown,) = re.findall(r"^```text\n(\d+ fused, .*?)^```$", text, re.DOTALL | re.MULTILINE)[:1]
    rows = [line for line in shown.splitlines()[1:] if " product " not in line]
    assert len(rows) > 1
    for line in rows:
        assert line in printed.getvalue().splitlines()


if __name__ == "__main__":
    for path in PAGES:
        content = path.read_text(encoding="utf-8")
        for match, new in reversed(run(path)):
            content = content[: match.start(1)] + new + content[match.end(1) :]
        path.write_text(content, encoding="utf-8")
