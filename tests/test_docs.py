"""What the pages say holds for the package: options, messages, commands. `make docs` checks links between pages."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from typer.main import get_command

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.cli.app import app
from lightning_pipeline.schedules import SCHEDULE_NAMES
from lightning_pipeline.strategy.copying import GIVEN_BY_TRAINER

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def rows(page: str) -> list[str]:
    """The first cells of a page's tables, without heads."""
    lines = (DOCS / page).read_text().splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ") and "---" not in line]


def messages() -> str:
    """The text of all strings in the package, with a gap in the place of what is formatted into them."""
    found = []
    for path in (ROOT / "lightning_pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_each_option_is_described() -> None:
    given = set(inspect.signature(PipelineStrategy).parameters) - set(GIVEN_BY_TRAINER)
    assert {cell.strip("`") for cell in rows("options.md")} - {"option"} == given


def test_the_messages_that_are_explained_exist() -> None:
    text = messages()
    # What stands between the backticks, up to numbers and names, which differ from case to case.
    cells = [fragment for cell in rows("debugging.md") for fragment in re.findall(r"`([^`]+)`", cell)]
    assert len(cells) > 20
    parts = [part.strip(" =()") for cell in cells for part in re.split(r"\s*\.\.\.,?\s*|\d+|'[^']*'", cell)]
    assert [words for words in parts if len(words.split()) > 1 and words not in text] == []


def test_each_command_is_described() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    page = (DOCS / "command-line.md").read_text()
    assert [name for name in commands if f"lightning-pipeline {name}" not in page] == []


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "forward"])
def test_each_schedule_is_described(name: str) -> None:
    assert f"`{name}`" in (DOCS / "schedules.md").read_text()


def test_each_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": {page.name}\n" not in menu] == []


def test_the_glossary_is_short() -> None:
    glossary = (DOCS / "architecture.md").read_text().partition("## Glossary")[2]
    assert len(re.findall(r"^\| \w[\w -]* \|", glossary, re.MULTILINE)) - 1 <= 15


def test_the_readme_is_short_and_stands_by_itself() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 8192
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("https://"), link
        page = re.match(r"https://github.com/lightning-pipeline/lightning-pipeline/blob/main/(.*)", link)
        assert page is None or (ROOT / page[1]).is_file(), link
