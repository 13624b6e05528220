"""Write the menu of the documentation's site from docs/index.md: `python -m tests.house.menu`.

The menu is `nav:` of mkdocs.yml. A heading of the index is a section, and each line of its list has
entries: the pages that it links to. A line that begins with words, not with a link, is a group.
Other pages of docs/measurements and docs/upstream follow, in the order of the former's README.md.
"""

import json
import re

from tests.house.files import ROOT

DOCS = ROOT / "docs"
SITE = ROOT / "mkdocs.yml"
# The menu in mkdocs.yml, a link to a page, and an item of a numbered list.
_NAV = re.compile(r"^nav:\n(?:  .*\n)*", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([\w./-]+\.md)\)")
_ITEM = re.compile(r"^\d+\. (.*)$", re.MULTILINE)


def format_menu() -> str:
    """Return the text of `nav:` for mkdocs.yml."""
    lines = ["nav:", "  - Home: index.md"]
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {"index.md"}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        lines.append(f"  - {section.partition(':')[0].strip()}:")
        for item in _ITEM.findall(section):
            links = [(title, page) for title, page in _LINK.findall(item) if page not in listed]
            listed |= {page for _, page in links}
            indent = " " * 6
            if not item.startswith("["):
                lines.append(f"{indent}- {re.split('[,:]', item)[0]}:")
                indent += " " * 4
            lines += [
                f"{indent}- {_quote(title[:1].upper() + title[1:])}: {page}"
                for title, page in links
            ]
    # Without a title: the site takes the page's heading.
    lines += [f"      - {page}" for page in list_measurements() if page not in listed]
    return "\n".join(lines) + "\n"


def list_measurements() -> list[str]:
    """Return the pages of docs/measurements and docs/upstream, in the order of their README."""
    guide = (DOCS / "measurements" / "README.md").read_text(encoding="utf-8")
    paths = [*DOCS.glob("measurements/*.md"), *DOCS.glob("upstream/*.md")]
    pages = [path.relative_to(DOCS).as_posix() for path in paths]
    position = {page: guide.find(f"({format_guide_link(page)})") for page in pages}
    # Pages that the guide does not link (-1) come last, by name.
    return sorted(pages, key=lambda page: (position[page] < 0, position[page], page))


def format_guide_link(page: str) -> str:
    """Return a page's target in docs/measurements/README.md."""
    return page.removeprefix("measurements/") if page.startswith("measurements/") else f"../{page}"


def _quote(title: str) -> str:
    """Return a title as a key of YAML: without backticks, and quoted if it has a colon."""
    plain = title.replace("`", "")
    return json.dumps(plain) if ": " in plain else plain


def main() -> None:
    """Write the menu into mkdocs.yml."""
    site = SITE.read_text(encoding="utf-8")
    SITE.write_text(_NAV.sub(lambda _: format_menu(), site), encoding="utf-8")


if __name__ == "__main__":
    main()
