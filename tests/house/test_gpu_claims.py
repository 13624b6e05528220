"""What README, guides and docstrings say has, or has not, run on a GPU is tied to the pages of what
was measured.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_pages import CARD, FOLDER, PAGES, SUMMARY, make_pages

ROOT = Path(__file__).parents[2]
# Reports say of themselves how they were made.
GUIDES = [
    ROOT / "README.md",
    FOLDER / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
SENTENCE = re.compile(r"(?<=[.;])\s+(?=[^a-z])")
DEVICE = re.compile(r"\b(GPUs?|CUDA|NCCL|H[12]00|cards? of 24 GB)\b")
DONE = r"(?:run|runs|ran|measured|tested|timed)"
NOTHING = (
    r"(?:[Nn]ever|(?<!could )not|[Nn]one|[Nn]either|[Nn]othing|[Nn]o (?:such"
    r" )?(?:cards?|plans?|lines?|time))"
)
DENIED = re.compile(
    rf"\b{NOTHING}\b[^.;:]{{0,80}}\b{DONE}\b"
    rf"|\b{DONE}\b[^.;:]{{0,60}}\b(?:on none|never|not on|so far|yet)\b"
)
FIGURE = re.compile(r"\bH200\b.*\d ?(?:%|s\b|GiB|tokens|TFLOP|TB/s|GB/s)")
DATA_SHEET = re.compile("[Dd]ata ?sheet")
MEASURING = re.compile(r"\bmeasured\b.*\bH200\b|\bH200\b.*\bmeasured\b")


def says_what_ran(sentence: str) -> bool:
    """Whether it denies that something has run or was measured on a GPU, or has figures of the one
    that was.
    """
    denies = DEVICE.search(sentence) and DENIED.search(sentence)
    return bool(denies or FIGURE.search(sentence) or MEASURING.search(sentence))


def paragraphs(path: Path) -> Iterator[str]:
    """Blocks of prose and rows of tables, without code."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        yield from (
            block.splitlines() if block.lstrip().startswith("|") else [" ".join(block.split())]
        )


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_about_a_gpu_links_to_what_was_measured(path: Path) -> None:
    place = "" if path.parent == FOLDER else r"(?:\.\./|docs/)*measurements/"
    link = re.compile(rf"\]\({place}(?:{SUMMARY}|[\w-]+-{CARD})\.md[)#]")
    loose = [
        sentence
        for paragraph in paragraphs(path)
        if not link.search(paragraph)
        for sentence in SENTENCE.split(paragraph)
        if says_what_ran(sentence)
    ]
    assert not loose, f"link to measurements/{SUMMARY}.md beside: {loose}"


def prose_of_code() -> Iterator[tuple[Path, str]]:
    """Docstrings and comments of the library and the recipes."""
    for path in [*(ROOT / "recipe_lib").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
                text := ast.get_docstring(node)
            ):
                yield path, " ".join(text.split())
        for comments in re.findall(r"(?:^ *#.*\n)+", source, flags=re.MULTILINE):
            yield path, " ".join(comments.replace("#", " ").split())


@pytest.mark.slow
def test_docstrings_about_a_gpu_name_what_was_measured() -> None:
    loose = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path, text in prose_of_code()
        if f"docs/measurements/{SUMMARY}.md" not in text
        for sentence in SENTENCE.split(text)
        if says_what_ran(sentence) and not DATA_SHEET.search(sentence)
    ]
    assert not loose, "\n".join(loose)


def test_pages_are_what_the_files_beside_them_give() -> None:
    for name, text in make_pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, (
            f"{name}: python -m benchmarks.gpu_pages"
        )
    assert {path.name for path in FOLDER.glob(f"*{CARD}.md")} == {f"{stem}.md" for stem in PAGES}


def test_each_page_says_where_and_with_what_it_was_measured() -> None:
    for name, text in make_pages().items():
        second = "levers" in name or "streams" in name
        said = ["H200", "6ea5ca75" if second else "d92500b8"]
        if not name.startswith(SUMMARY):
            said += ["2026-11-29" if second else "2026-11-27", "torch 2.11.0"]
            said += ["580.159.04", "700.00 W"]
        assert all(words in text for words in said), (
            name,
            [words for words in said if words not in text],
        )
