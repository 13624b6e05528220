"""What docs/upstream reports of torch's pipelines is what torch still does."""

import importlib.util
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "docs" / "upstream"
REPORTED = (2, 13)


def printed_block(page: Path) -> list[str]:
    """The lines that the page says its script has printed."""
    (block,) = re.findall(
        r"It printed:\n\n```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return str(block).splitlines()


def printed_lines(script: Any, store: Path) -> list[str]:
    """What the first rank of a script prints, which its other lines only start."""

    def work() -> list[str]:
        with redirect_stdout(io.StringIO()) as printed:
            script.main(int(os.environ["RANK"]), store)
        return printed.getvalue().splitlines()

    return run_ranks(work, script.RANKS, process_group=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["zero_bubble_gradients", "zero_bubble_recomputation"])
def test_torch_does_what_is_reported(name: str, tmp_path: Path) -> None:
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    if here < REPORTED:
        pytest.skip(
            f"reported of torch {'.'.join(map(str, REPORTED))}, this is {torch.__version__}"
        )
    spec: Any = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = printed_lines(script, tmp_path / "store")
    _, *reported = printed_block(FOLDER / f"{name}.md")
    assert found == reported, (
        f"torch {torch.__version__} does not do what docs/upstream/{name}.md reports. If it is"
        " better: note the version there, and see docs/pipeline.md,"
        " docs/measurements/pp_gradients.md and pp_memory.md, which say the same of torch's stages"
    )
