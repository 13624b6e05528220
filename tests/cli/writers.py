"""Every file and folder that `tune` writes where its user says: a row of WRITERS for each.

test_writers.py runs every row on paths that exist, cannot be written, or are on a full disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from recipe_lib.cli.main import main
from tests.cli.commands import ROOT
from tests.cli.machines import build_healthy
from tests.evaluation.models import write_model, write_rows
from tests.recipes.runs import LORA, build_arguments

TORCHTUNE = ROOT / "tests" / "config" / "torchtune_lora.yaml"
RATES = {"version": 1, "device": "cuda", "dry_run": False, "matmul": {}}
# What a writer writes: a file, a folder that must not exist, or one that may.
FILE = "file"
NEW_FOLDER = "new folder"
FOLDER = "folder"


class Material:
    """What the commands read, made once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = write_model("llama", folder / "model")
        self.rows = write_rows(folder)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text('{"prompt": "Once"}')  # no newline at its end
        self.config = folder / "mine.yaml"
        self.config.write_text("recipe: full_finetune_distributed\n")

    @property
    def of_model(self) -> list[str]:
        """Return the words of a run that starts from the model instead of the preset."""
        words = [
            word
            for word in build_arguments(self.folder / "unused")
            if not word.startswith(("model.", "output_dir="))
        ]
        return [*words, "~model.preset", f"model.path={self.model}", "device=cpu", "max_steps=1"]

    @cached_property
    def trained(self) -> Path:
        """Return the folder of a run that trained all weights and saved its state."""
        out = self.folder / "trained"
        words = ["max_steps=1", "checkpoint.save_every_n_steps=1", "device=cpu"]
        assert main(["run", *build_arguments(out), *words]) == 0
        return out

    @cached_property
    def adapted(self) -> Path:
        """Return the folder of a run that trained an adapter."""
        out = self.folder / "adapted"
        assert main(["run", LORA, *self.of_model, f"recipe={LORA}", f"output_dir={out}"]) == 0
        return out

    @cached_property
    def plan(self) -> Any:
        """Return a plan and its trace, as `tune plan` makes them."""
        from recipe_lib.cli import plan

        # Trained before there is a simulated device, with which no fork could train.
        assert self.trained
        with mock.patch.object(plan, "write_files") as write:
            assert main(["plan", *self.run_words, "--device", "24GB"]) == 0
        return write.call_args.args[:2]

    @cached_property
    def run_words(self) -> list[str]:
        """Return the words of the smallest run."""
        return [*build_arguments(self.folder / "unused"), "max_steps=1", "device=cpu"]


# Returns the words of the command that writes a path.
Words = Callable[[Material, Path], Sequence[object]]


@dataclass(frozen=True)
class Writer:
    """A command and the option, or key of the config, that names what it writes."""

    verb: str
    option: str
    words: Words
    kind: str = FILE
    ending: str = ""  # of the path's name
    reads: tuple[str, ...] = ()  # attributes of `Material` that it reads: the path may not be one
    full: tuple[int, ...] = (100,)  # bytes that a file may have on a full disk, each of them tried
    names: tuple[str, ...] = ()  # files of a folder that are overwritten
    note: str = ""  # tells rows of one option apart
    source: str = ""  # attribute of `Material` that is written
    slow: bool = False  # takes seconds until it writes

    def __str__(self) -> str:
        return f"{self.verb} {self.option} {self.note}".strip()


def build_plan_words(option: str) -> Words:
    """Return the words of a plan that is written by an option."""
    return lambda material, out: ["plan", *material.run_words, "--device", "24GB", option, out]


def build_export_words(source: str, *options: str) -> Words:
    """Return the words of an export of something in the material."""
    return lambda material, out: ["export", getattr(material, source), *options, "--out", out]


WRITERS = (
    Writer("cp", "DEST", lambda material, out: ["cp", "demo/full", out], ending=".yaml"),
    Writer("cp", "DEST", lambda material, out: ["cp", material.config, out, "--force"], ending=".yaml",
           reads=("config",), note="--force", full=(10,)),
    Writer("import", "--out", lambda material, out: ["import", TORCHTUNE, "--out", out], ending=".yaml", full=(400,)),
    Writer("plan", "--json", build_plan_words("--json"), source="plan"),
    Writer("plan", "--json", lambda material, out: ["plan", "--receipts", "--json", out], note="--receipts",
           full=(10,)),
    Writer("plan", "--html", build_plan_words("--html"), source="plan"),
    Writer("plan", "--snapshot", build_plan_words("--snapshot"), source="plan"),
    Writer("plan", "--calibrate", lambda material, out: ["plan", "--calibrate", out], full=(10,)),
    Writer("tp-plan", "--json", lambda material, out: ["tp-plan", material.model, "--tensor", 2, "--json", out]),
    Writer("doctor", "--write", lambda material, out: ["doctor", "--write", out], full=(10,)),
    Writer("run", "output_dir", lambda material, out: ["run", *build_arguments(out), "max_steps=1", "device=cpu"],
           FOLDER, slow=True, names=("config.yaml", "metrics.jsonl", "summary.json", "report.html"), full=(100, 20000)),
    Writer("eval", "--out", lambda material, out: ["eval", material.model, "--data", material.rows, "--no-generate",
                                                   "--out", out],
           FOLDER, slow=True, names=("examples.jsonl", "summary.json", "report.html"), full=(100, 5000)),
    Writer("export", "--out", build_export_words("adapted", "--merge"), NEW_FOLDER, slow=True, note="--merge",
           source="adapted"),
    Writer("export", "--out", build_export_words("adapted", "--adapter"), NEW_FOLDER, slow=True, note="--adapter",
           source="adapted"),
    Writer("export", "--out", build_export_words("trained", "--hf"), NEW_FOLDER, slow=True, note="--hf",
           source="trained"),
    Writer("export", "--out", build_export_words("model", "--gguf", "f32", "--pre", "llama-bpe"), ending=".gguf",
           slow=True, note="--gguf"),
    Writer("export", "--out", build_export_words("model", "--quantize", "int8"), NEW_FOLDER, slow=True, note="--quantize",
           full=(4000,)),
    Writer("generate", "--out", lambda material, out: ["generate", material.model, "--prompts", material.prompts,
                                                       "--out", out, "--max-new-tokens", 2, "--device", "cpu"],
           ending=".jsonl", reads=("prompts",)),
)  # fmt: skip

# Options whose files other code writes, or that have tests of their own.
NOT_IN_THE_TABLE = {
    ("download", "--output-dir"): "the hub's own client writes aside; tests/cli/test_download.py",
    ("run", "--log-dir"): "torchrun's own",
    # fmt: off
    (
        "run",
        "data.cache_dir",
    ): "what cannot be kept there stays in memory; tests/data/test_cache.py",
    # fmt: on
}


def write(writer: Writer, material: Material, out: Path) -> int:
    """Run the command in this process and return its exit code.

    What it would measure or plan first is replaced by results at hand.
    """
    from recipe_lib.cli import doctor, plan
    from recipe_lib.plan.measured import measure_rates as calibrate

    facts = build_healthy()
    plans = material.plan if writer.source == "plan" else None
    with (
        mock.patch.object(doctor, "gather_facts", lambda arguments: facts),
        mock.patch.object(calibrate, "calibrate", lambda: dict(RATES)),
        mock.patch.object(plan, "make_plan_and_trace", lambda recipe, cfg, arguments: plans),
    ):
        return main([str(word) for word in writer.words(material, out)])
