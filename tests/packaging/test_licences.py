"""The list of licences has every dependency, and says what the installed packages say of themselves."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROWS = {
    name: (version, licence)
    for name, version, licence in re.findall(
        r"^\| ([\w-]+) \| ([\d.a-z]+) \| ([^|]+) \| [^|]+ \|$",
        (ROOT / "docs" / "licences.md").read_text(),
        re.MULTILINE,
    )
}


def dependencies() -> set[str]:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}  # type: ignore[index]
    return names - {"jaxmoe"}


def said(name: str) -> str:
    """The licence by a package's metadata: an expression, the short text, or the classifier."""
    metadata = importlib.metadata.metadata(name)
    text = metadata.get("License-Expression") or metadata.get("License") or ""
    if text and len(text) < 80 and "\n" not in text:
        return text
    return next(c.split(" :: ")[-1] for c in metadata.get_all("Classifier", []) if c.startswith("License"))


def test_every_dependency_is_listed_and_nothing_else():
    assert set(ROWS) == dependencies()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_licence_is_what_the_package_says(name):
    version, licence = ROWS[name]
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed here")
    if installed != version:
        pytest.skip(f"{name} {installed} is installed; the list is of {version}")
    assert said(name) == licence


def test_pins_are_the_versions_that_were_looked_at():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, (version, _) in ROWS.items():
        assert pins.get(name, version) == version, name
