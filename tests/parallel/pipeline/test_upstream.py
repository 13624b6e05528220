"""What docs/upstream reports of torch's pipelines is what torch still does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "docs" / "upstream"
REPORTED = (2, 13)


def printed_block(page: Path) -> list[str]:
    """The lines that the page says its script has printed."""
    (block,) = re.findall(r"It printed:\n\n```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    return str(block).splitlines()


@pytest.mark.parametrize("name", ["zero_bubble_gradients", "zero_bubble_recomputation"])
def test_torch_does_what_is_reported(name: str) -> None:
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    if here < REPORTED:
        pytest.skip(f"reported of torch {'.'.join(map(str, REPORTED))}, this is {torch.__version__}")
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    version, *found = done.stdout.splitlines()
    _, *reported = printed_block(FOLDER / f"{name}.md")
    assert found == reported, (
        f"{version} does not do what docs/upstream/{name}.md reports. If it is better: note the version there, and see "
        "docs/pipeline.md, docs/measurements/pp_gradients.md and pp_memory.md, which say the same of torch's stages"
    )
