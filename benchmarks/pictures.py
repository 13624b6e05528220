"""Make the pictures of the README: a plan's memory timeline and a run's report.

    python -m benchmarks.pictures --output docs/pictures

Plans Llama 3 8B on four cards of 24 GB, trains the demo (minutes on a CPU), and photographs parts
of the HTML pages that `tune plan --html` and the run have written, with a headless Chromium.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Words after `tune`.
PLAN = "plan llama3/8B_full --nproc_per_node 4 --device rtx4090 batch_size=1"
RUN = "run demo/full"
PARTS = {"plan": 1, "run": 4}  # how many of each page's first figures are shown
SIZES = {"plan": (1100, 660), "run": (1100, 940)}  # (width, height) of the window, CSS pixels
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def run_tune(command: str, *words: str) -> None:
    """Run a command of `tune`; its output is printed here.

    words: after the command's own. Raises CalledProcessError if it fails.
    """
    subprocess.run([sys.executable, "-m", "recipe_lib", *shlex.split(command), *words], check=True)


def cut_page(page: str, figures: int) -> str:
    """Return the HTML page with its title and its first figures alone.

    Raises SystemExit if it does not have them.
    """
    head, _, body = page.partition("<body>")
    title = re.search(r"<h1>.*?</p>", body, re.DOTALL)
    first_figures = re.findall(r"<figure>.*?</figure>", body, re.DOTALL)[:figures]
    if title is None or len(first_figures) < figures:
        raise SystemExit(f"error: found {len(first_figures)} figures, expected {figures}")
    style = "<style>body { padding: 1.5rem; } .charts { margin-top: 1rem; }</style>"
    css_class = "charts" if figures > 1 else ""
    return (
        f'{head}{style}<body>{title[0]}<div class="{css_class}" style="margin-top:'
        f' 1rem">{"".join(first_figures)}</div></body></html>'
    )


def photograph(browser: str, page: Path, to: Path, size: tuple[int, int]) -> None:
    """Write a PNG of a page, three pixels for two of the window's.

    browser: its program. size: width and height of the window, CSS pixels.
    """
    width, height = size
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1.5",
        f"--window-size={width},{height}",
        f"--screenshot={to}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)


def main(argv: list[str] | None = None) -> None:
    """Make both pages and write both pictures."""
    parser = argparse.ArgumentParser(description="Make the pictures of the README.")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="gets plan.png and run.png"
    )
    parser.add_argument(
        "--browser", help=f"default: the first that there is of {', '.join(_BROWSERS)}"
    )
    arguments = parser.parse_args(argv)
    browser = arguments.browser or next((name for name in _BROWSERS if shutil.which(name)), None)
    if browser is None:
        raise SystemExit(
            f"error: no browser found; install one of {', '.join(_BROWSERS)}, or name it with"
            " --browser"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages = {"plan": folder / "plan.html", "run": folder / "demo" / "report.html"}
        run_tune(PLAN, "--html", str(pages["plan"]))
        run_tune(RUN, f"output_dir={pages['run'].parent}")
        for kind, page in pages.items():
            cut = folder / f"{kind}_part.html"
            text = cut_page(page.read_text(encoding="utf-8"), PARTS[kind])
            cut.write_text(text, encoding="utf-8")
            picture = arguments.output.resolve() / f"{kind}.png"
            photograph(browser, page=cut, to=picture, size=SIZES[kind])


if __name__ == "__main__":
    main()
