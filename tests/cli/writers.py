"""List every file and folder that `tune` writes where its user says, in the table WRITERS.

test_writers.py runs each of its rows, a command, on paths that exist, cannot be written, or are on
a full disk.
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
# Calibration in place of a measured one, see `write`.
RATES = {"version": 1, "device": "cuda", "dry_run": False, "matmul": {}}
# Kinds of what is written.
FILE = "file"
NEW_FOLDER = "new folder"  # that must not exist
FOLDER = "folder"  # that may exist


class Material:
    """Files that the commands read, each written once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = write_model("llama", folder / "model")  # folder of a tiny model
        self.rows = write_rows(folder)  # file of samples
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text('{"prompt": "Once"}')  # no newline at its end
        self.config = folder / "mine.yaml"
        self.config.write_text("recipe: full_finetune_distributed\n")

    @property
    def of_model(self) -> list[str]:
        """Return the words of a run that starts from the model's weights, not from a preset."""
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
        """Return (plan, trace of its simulation), as `tune plan` makes them."""
        from recipe_lib.cli import plan

        # Train before there is a simulated device: it stays in the process, and no fork of it could
        # train then.
        assert self.trained
        # `write_files(plan, trace, ...)` writes what the options ask for.
        with mock.patch.object(plan, "write_files") as write:
            assert main(["plan", *self.run_words, "--device", "24GB"]) == 0
        return write.call_args.args[:2]

    @cached_property
    def run_words(self) -> list[str]:
        """Return the words of the smallest run."""
        return [*build_arguments(self.folder / "unused"), "max_steps=1", "device=cpu"]


# Returns the words of a command that writes the path; `write` makes each a string.
Words = Callable[[Material, Path], Sequence[object]]


@dataclass(frozen=True)
class Writer:
    """A command, with the option or key of the config that names what it writes."""

    verb: str  # of `tune VERB`
    option: str  # or the key
    words: Words
    kind: str = FILE  # FILE, NEW_FOLDER or FOLDER
    ending: str = ""  # of the path's name
    reads: tuple[str, ...] = ()  # attributes of `Material` that it reads: the path may not be one
    full: tuple[int, ...] = (100,)  # bytes that a file may have on a full disk, each of them tried
    names: tuple[str, ...] = ()  # files that it overwrites in a folder that exists
    note: str = ""  # tells rows of one option apart
    source: str = ""  # attribute of `Material` that has to be made before the disk is full
    slow: bool = False  # it takes seconds until it writes

    def __str__(self) -> str:
        return f"{self.verb} {self.option} {self.note}".strip()


def build_plan_words(option: str) -> Words:
    """Return the words of `tune plan` with an option that names the file to write."""
    return lambda material, out: ["plan", *material.run_words, "--device", "24GB", option, out]


def build_export_words(source: str, *options: str) -> Words:
    """Return the words of `tune export`. source: attribute of `Material` to export."""
    return lambda material, out: ["export", getattr(material, source), *options, "--out", out]


WRITERS = (
    Writer("cp", "DEST", words=lambda material, out: ["cp", "demo/full", out], ending=".yaml"),
    Writer("cp", "DEST", words=lambda material, out: ["cp", material.config, out, "--force"], ending=".yaml",
           reads=("config",), note="--force", full=(10,)),
    Writer("import", "--out", words=lambda material, out: ["import", TORCHTUNE, "--out", out], ending=".yaml",
           full=(400,)),
    Writer("plan", "--json", words=build_plan_words("--json"), source="plan"),
    Writer("plan", "--json", words=lambda material, out: ["plan", "--receipts", "--json", out], note="--receipts",
           full=(10,)),
    Writer("plan", "--html", words=build_plan_words("--html"), source="plan"),
    Writer("plan", "--snapshot", words=build_plan_words("--snapshot"), source="plan"),
    Writer("plan", "--calibrate", words=lambda material, out: ["plan", "--calibrate", out], full=(10,)),
    Writer("tp-plan", "--json", words=lambda material, out: ["tp-plan", material.model, "--tensor", 2, "--json", out]),
    Writer("doctor", "--write", words=lambda material, out: ["doctor", "--write", out], full=(10,)),
    Writer("run", "output_dir", words=lambda material, out: ["run", *build_arguments(out), "max_steps=1", "device=cpu"],
           kind=FOLDER, slow=True, names=("config.yaml", "metrics.jsonl", "summary.json", "report.html"),
           full=(100, 20000)),
    Writer("eval", "--out", words=lambda material, out: ["eval", material.model, "--data", material.rows,
                                                         "--no-generate", "--out", out],
           kind=FOLDER, slow=True, names=("examples.jsonl", "summary.json", "report.html"), full=(100, 5000)),
    Writer("export", "--out", words=build_export_words("adapted", "--merge"), kind=NEW_FOLDER, slow=True,
           note="--merge", source="adapted"),
    Writer("export", "--out", words=build_export_words("adapted", "--adapter"), kind=NEW_FOLDER, slow=True,
           note="--adapter", source="adapted"),
    Writer("export", "--out", words=build_export_words("trained", "--hf"), kind=NEW_FOLDER, slow=True,
           note="--hf", source="trained"),
    Writer("export", "--out", words=build_export_words("model", "--gguf", "f32", "--pre", "llama-bpe"), ending=".gguf",
           slow=True, note="--gguf"),
    Writer("export", "--out", words=build_export_words("model", "--quantize", "int8"), kind=NEW_FOLDER, slow=True,
           note="--quantize", full=(4000,)),
    Writer("generate", "--out", words=lambda material, out: ["generate", material.model, "--prompts", material.prompts,
                                                             "--out", out, "--max-new-tokens", 2, "--device", "cpu"],
           ending=".jsonl", reads=("prompts",)),
)  # fmt: skip

# (verb, option) that is not in the table -> which code writes the file, or which test has it.
NOT_IN_THE_TABLE = {
    ("download", "--output-dir"): "the hub's own client writes aside; tests/cli/test_download.py",
    ("run", "--log-dir"): "torchrun's own",
    ("run", "data.cache_dir"): (
        "what cannot be kept there stays in memory; tests/data/test_cache.py"
    ),
}


def write(writer: Writer, material: Material, out: Path) -> int:
    """Run the command in this process and return its exit code.

    Facts of the machine, measured rates and plans are replaced: they would take too long.
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
