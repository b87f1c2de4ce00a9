"""The guides: their code runs as printed, their links lead somewhere, and their lists are complete."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

from jaxmoe import errors

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))


def code(text: str) -> str:
    """The Python blocks, everything else blank, so that line numbers are those of the file."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("guide", [g for g in GUIDES if "\n>>> " in g.read_text()], ids=lambda g: g.stem)
def test_code_runs_as_printed(guide, monkeypatch):
    monkeypatch.chdir(ROOT)
    test = doctest.DocTestParser().get_doctest(code(guide.read_text()), {}, guide.name, str(guide), 0)
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test, out=told.append)
    assert result.attempted > 2 and result.failed == 0, "".join(told)


def test_every_python_block_is_run():
    for guide in GUIDES:
        for block in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
            assert block.startswith(">>> ") and block.endswith("\n\n"), f"{guide.name}: {block}"


def test_links_and_files_exist():
    for guide in GUIDES:
        text = guide.read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in link:
                assert (guide.parent / link).exists(), f"{guide.name}: {link}"
        for name in re.findall(r"`((?:examples|tests|jaxmoe|ffi)/[\w/]+\.?\w*)`", text):
            assert (ROOT / name).exists(), f"{guide.name}: {name}"


def test_the_index_lists_all():
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert sorted([*listed, "README.md"]) == [g.name for g in GUIDES]


def test_the_error_catalogue_is_complete():
    text = (ROOT / "docs" / "errors.md").read_text()
    found = {
        name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
    }
    headings = re.findall(r"^## (\w+)\n\nA `(\w+)`\.", text, re.MULTILINE)
    assert sorted(name for name, _ in headings) == sorted(found)
    for name, base in headings:
        assert found[name].__bases__[0].__name__ == base
