"""All that `tune` writes where its user says: one row a writer, for the table in
test_writers.py.
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
FILE, NEW_FOLDER, FOLDER = "file", "new folder", "folder"


class Material:
    """What the writers read, made once."""

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
        """Words of a run that begins from the model, in place of the preset."""
        begin = [
            word
            for word in build_arguments(self.folder / "unused")
            if not word.startswith(("model.", "output_dir="))
        ]
        return [*begin, "~model.preset", f"model.path={self.model}", "device=cpu", "max_steps=1"]

    @cached_property
    def trained(self) -> Path:
        """Of all weights, with a state."""
        out = self.folder / "trained"
        assert (
            main(
                [
                    "run",
                    *build_arguments(out),
                    "max_steps=1",
                    "checkpoint.save_every_n_steps=1",
                    "device=cpu",
                ]
            )
            == 0
        )
        return out

    @cached_property
    def adapted(self) -> Path:
        """Of an adapter."""
        out = self.folder / "adapted"
        assert main(["run", LORA, *self.of_model, f"recipe={LORA}", f"output_dir={out}"]) == 0
        return out

    @cached_property
    def plan(self) -> Any:
        """A plan and its trace, as `tune plan` makes them."""
        from recipe_lib.cli import plan

        assert self.trained  # before there is a simulated device, with which no fork could train
        with mock.patch.object(plan, "write_files") as write:
            assert main(["plan", *self.run_words, "--device", "24GB"]) == 0
        return write.call_args.args[:2]

    @cached_property
    def run_words(self) -> list[str]:
        """Of the smallest run."""
        return [*build_arguments(self.folder / "unused"), "max_steps=1", "device=cpu"]


Words = Callable[[Material, Path], Sequence[object]]


@dataclass(frozen=True)
class Writer:
    """verb, option: as they are typed; a key of the config where the option is none. words: of the
    command that writes a path. kind: a file, a folder that must not be there, or one that is gone
    on with. ending: of the path's name. reads: attributes of `Material` that are read, which the
    path may not be. full: bytes that a file may have on a full disk, to be tried one by one. names:
    of a folder's files that are written over. source: of `Material`, what is written. slow: takes
    seconds to get to the writing.
    """

    verb: str
    option: str
    words: Words
    kind: str = FILE
    ending: str = ""
    reads: tuple[str, ...] = ()
    full: tuple[int, ...] = (100,)
    names: tuple[str, ...] = ()
    note: str = ""
    source: str = ""
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.option} {self.note}".strip()


def plan_words(option: str) -> Words:
    """Return the words of a plan that is written by an option."""
    return lambda material, out: ["plan", *material.run_words, "--device", "24GB", option, out]


def export_words(source: str, *options: str) -> Words:
    """Return the words of an export of something in the material."""
    return lambda material, out: ["export", getattr(material, source), *options, "--out", out]


WRITERS = (
    Writer("cp", "DEST", lambda material, out: ["cp", "demo/full", out], ending=".yaml"),
    Writer("cp", "DEST", lambda material, out: ["cp", material.config, out, "--force"], ending=".yaml",
           reads=("config",), note="--force", full=(10,)),
    Writer("import", "--out", lambda material, out: ["import", TORCHTUNE, "--out", out], ending=".yaml", full=(400,)),
    Writer("plan", "--json", plan_words("--json"), source="plan"),
    Writer("plan", "--json", lambda material, out: ["plan", "--receipts", "--json", out], note="--receipts",
           full=(10,)),
    Writer("plan", "--html", plan_words("--html"), source="plan"),
    Writer("plan", "--snapshot", plan_words("--snapshot"), source="plan"),
    Writer("plan", "--calibrate", lambda material, out: ["plan", "--calibrate", out], full=(10,)),
    Writer("tp-plan", "--json", lambda material, out: ["tp-plan", material.model, "--tensor", 2, "--json", out]),
    Writer("doctor", "--write", lambda material, out: ["doctor", "--write", out], full=(10,)),
    Writer("run", "output_dir", lambda material, out: ["run", *build_arguments(out), "max_steps=1", "device=cpu"],
           FOLDER, slow=True, names=("config.yaml", "metrics.jsonl", "summary.json", "report.html"), full=(100, 20000)),
    Writer("eval", "--out", lambda material, out: ["eval", material.model, "--data", material.rows, "--no-generate",
                                                   "--out", out],
           FOLDER, slow=True, names=("examples.jsonl", "summary.json", "report.html"), full=(100, 5000)),
    Writer("export", "--out", export_words("adapted", "--merge"), NEW_FOLDER, slow=True, note="--merge",
           source="adapted"),
    Writer("export", "--out", export_words("adapted", "--adapter"), NEW_FOLDER, slow=True, note="--adapter",
           source="adapted"),
    Writer("export", "--out", export_words("trained", "--hf"), NEW_FOLDER, slow=True, note="--hf",
           source="trained"),
    Writer("export", "--out", export_words("model", "--gguf", "f32", "--pre", "llama-bpe"), ending=".gguf",
           slow=True, note="--gguf"),
    Writer("export", "--out", export_words("model", "--quantize", "int8"), NEW_FOLDER, slow=True, note="--quantize",
           full=(4000,)),
    Writer("generate", "--out", lambda material, out: ["generate", material.model, "--prompts", material.prompts,
                                                       "--out", out, "--max-new-tokens", 2, "--device", "cpu"],
           ending=".jsonl", reads=("prompts",)),
)  # fmt: skip

# Written by somebody else's code, or tested where it is written.
NOT_IN_THE_TABLE = {
    ("download", "--output-dir"): "the hub's own client writes aside; tests/cli/test_download.py",
    ("run", "--log-dir"): "torchrun's own",
    (
        "run",
        "data.cache_dir",
    ): "what cannot be kept there stays in memory; tests/data/test_cache.py",
}


def write(writer: Writer, material: Material, out: Path) -> int:
    """Run the command in this process; what it measures or plans first is known already. Returns
    its exit code.
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
