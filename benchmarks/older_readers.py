"""Compare what earlier releases of transformers compute from our exports with the model itself.

Run `python -m benchmarks.older_readers --output docs/measurements/older_readers.md`. Each release
is installed in an environment of its own (3 GB in all; `--environments` keeps them) and reads a
small random model of every family, saved by today's transformers (`theirs`) and by us (`ours`).
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import venv
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from recipe_lib.checkpoint.huggingface import export_model, load_weights
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.external.module_spec import read_spec
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import ModelSpec
from tests.models.reference import CASES, build_reference_model

COMMAND = "python -m benchmarks.older_readers --output docs/measurements/older_readers.md"
RELEASES = {  # of transformers -> the torch that it is installed with
    "4.57.6": "torch==2.13.0",
    "4.46.3": "torch==2.13.0",
}
# Families that are trained in transformers' own class, whose config has `rope_parameters`.
EXTERNAL = (
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "glm",
    "gpt_neox",
    "granite",
    "olmo2",
    "persimmon",
    "phi",
    "qwen2_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
# Entries of a case's config that are changed. transformers 4 has this limit built in.
CHANGED: dict[str, dict[str, Any]] = {"gpt-oss": {"swiglu_limit": 7.0}}
# RoPE's base. It is no family's default, so that a release which does not read it shows.
BASE = 777.0
LENGTH = 48  # tokens of the prompt
# Run by each environment's Python with an output file and folders of models. Writes by folder the
# largest difference of logits as a share of the largest logit, or the error.
READER = """
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch, transformers
from safetensors.torch import load_file
transformers.logging.set_verbosity_error()
found = {}
for folder in map(Path, sys.argv[2:]):
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, \
attn_implementation="eager").eval()
        expected = load_file(folder.parent / "expected.safetensors")
        with torch.no_grad():
            logits = model(expected["tokens"]).logits
        found[str(folder)] = float((logits - expected["logits"]).abs().max() / \
expected["logits"].abs().max())
    except Exception as error:
        found[str(folder)] = f"{type(error).__name__}: {error}"[:200]
Path(sys.argv[1]).write_text(json.dumps(found))
"""


def main(argv: list[str] | None = None) -> None:
    """Write the models, have every release read them, and write the page."""
    parser = argparse.ArgumentParser(
        description="Compare what earlier releases of transformers compute from our exports.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    parser.add_argument("--environments", type=Path, help="a folder that keeps the environments")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        environments = arguments.environments or Path(folder) / "environments"
        models = Path(folder) / "models"
        folders = [write_native(models / case, case) for case in CASES]
        folders += [write_external(models / name, name) for name in EXTERNAL]
        measured = {
            release: measure_release(environments, release, folders) for release in RELEASES
        }
        arguments.output.write_text(format_page(folders, measured), encoding="utf-8")


def write_native(folder: Path, case: str) -> Path:
    """Write a model of our own decoder, of one of the tests' CASES. Returns its folder."""
    return write_both(folder, build_reference_model(case, **CHANGED.get(case, {})), external=False)


def write_external(folder: Path, family: str) -> Path:
    """Write a model of one of EXTERNAL, with small random weights. Returns its folder."""
    config = shrink(transformers.AutoConfig.for_model(family))
    config.rope_parameters["rope_theta"] = BASE
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    randomize(model)
    return write_both(folder, model, external=True)


@torch.no_grad()
def write_both(folder: Path, model: Any, *, external: bool) -> Path:
    """Write a model as folder/theirs by transformers and as folder/ours by our export.

    Beside them are tokens and the model's logits for them. external: of EXTERNAL. Returns folder.
    """
    model.save_pretrained(folder / "theirs")
    # Any ids that every small vocabulary has, without the special ones below 3.
    tokens = torch.arange(LENGTH)[None] * 37 % 91 + 3
    save_file({"tokens": tokens, "logits": model(tokens).logits}, folder / "expected.safetensors")
    config = read_config(folder / "theirs")
    spec: ModelSpec
    if external:
        spec = read_spec(config, folder.name)
    else:
        spec = build_spec(config, folder.name)
    ours = build_meta(spec, torch.float32)
    allocate(ours, torch.device("cpu"))
    load_weights(ours, spec, folder / "theirs")
    export_model(
        ours,
        spec=spec,
        source_config=config,
        out=folder / "ours",
        tokenizer_folder=None,
        max_shard_bytes=2**30,
        world=SingleRank(),
    )
    return folder


def measure_release(
    environments: Path, release: str, folders: list[Path]
) -> dict[str, float | str]:
    """Have a release read both models of each folder; return path -> what READER writes of it.

    environments: folder of all environments, in which a missing one is made.
    """
    environment = environments / release
    python = environment / "bin" / "python"
    if not python.is_file():
        venv.create(environment, with_pip=True)
        for package in (RELEASES[release], f"transformers=={release}"):
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", package, "numpy"], check=True
            )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        paths = []
        for model_folder in folders:
            paths += [model_folder / "theirs", model_folder / "ours"]
        subprocess.run([python, "-c", READER, output, *map(str, paths)], check=True)
        measured: dict[str, float | str] = json.loads(output.read_text())
        return measured


def format_page(folders: list[Path], measured: dict[str, dict[str, float | str]]) -> str:
    """Return the page: a row for each model, two columns for each release.

    measured: release -> what `measure_release` returned.
    """
    columns = list(product(RELEASES, ("theirs", "ours")))
    title = {"theirs": f"file of {transformers.__version__}", "ours": "our export"}
    lines = [
        "# Exports in earlier releases of transformers\n",
        f"```bash\n{COMMAND}\n```\n",
        (
            "Small random models of every family are saved by transformers"
            f" {transformers.__version__}, and exported here. An earlier release reads both. Each"
            " cell is the largest difference of its logits from those of the model, as a share of"
            " the largest logit. The first models are trained in the library's own decoder, the"
            f" others with `model.implementation=transformers`; the base of those is {BASE:g},"
            " which is no family's default.\n"
        ),
        (
            "`unknown`: the release has no such family. What our export cannot mend is in the"
            " release: 4.46.3 has no `original_max_position_embeddings` of YaRN, rotates all"
            " channels of Phi 4 mini, and gives all layers of Qwen 2.5 the window of some.\n"
        ),
        "| model | "
        + " | ".join(f"{release}, {title[whose]}" for release, whose in columns)
        + " |",
        "|---|" + "---|" * len(columns),
    ]
    for folder in folders:
        cells = [format_cell(measured[release][str(folder / whose)]) for release, whose in columns]
        lines.append(f"| {folder.name} | {' | '.join(cells)} |")
    # How many the newest of RELEASES reads right.
    for whose in ("theirs", "ours"):
        values = [measured["4.57.6"][str(folder / whose)] for folder in folders]
        num_same = sum(isinstance(value, float) and value < 1e-5 for value in values)
        lines.append(
            f"\n4.57.6 computes the model from {num_same} of {len(values)}: {title[whose]}."
        )
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python"
        f" {platform.python_version()}"
    )
    return (
        "\n".join(lines)
        + f"\n\nWritten with {versions}; {platform.system()} {platform.machine()}, CPU.\n"
    )


def format_cell(value: float | str) -> str:
    """Return a difference or an error as a cell, bold if the release computes another model."""
    # fp32 logits of the same model differ by less than 1e-5.
    if isinstance(value, str):
        return "unknown" if "does not recognize" in value else f"**{value.partition(':')[0]}**"
    return f"{value:.1g}" if value < 1e-5 else f"**{value:.2g}**"


if __name__ == "__main__":
    main(sys.argv[1:])
