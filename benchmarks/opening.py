"""Measure opening a published folder beside transformers, and the memory of carrying a large one.

    python -m benchmarks.opening --output docs/measurements/opening.md

The folder is of Qwen 3.5's published class, made here with random weights: a text model, a vision
tower and MTP tensors that the class does not read. Each side opens it in a process of its own, in
turn, after a small folder of the class, which does the imports. Then a folder with sparse files of `--carried` GiB beside a small model is
exported; that takes as much room on the disk.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from recipe_lib.checkpoint.export_shards import find_carried
from recipe_lib.checkpoint.huggingface import export_model, load_weights
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.models import allocate, build_meta, read_config, read_spec
from recipe_lib.units import GIB, MIB

SIDES = ("ours", "mapped", "copied")
COMMAND = "python -m benchmarks.opening --output docs/measurements/opening.md"
TEXT = """# Opening a published folder

For those who ask what a run does before its first step.

    {command}

A folder of Qwen 3.5's published class with random weights in bf16: {size:.2f} GiB, of which \
{text:.2f} GiB are the text model. Transformers opens the class with its vision tower, as \
`from_pretrained` does; a run opens the text model that it trains. Both on the CPU, files in the \
page cache, after a small folder of the class, for the imports; median of {repeats} runs in turn. \
The peak is what is resident above that, mapped pages of the files included. Versions: {versions}.

On a CPU, and for weights of the file's type, `from_pretrained` maps the files: no value is read \
before it is used. The last row copies each parameter then, so that the weights are the process' \
own, as they are here and as they are on a GPU.

| | seconds | resident peak, GiB | seconds here / there | peak here / there |
|---|---:|---:|---:|---:|
{rows}

## Carrying what is not trained

A model of {model_mib:.0f} MiB with {carried:.1f} GiB of tensors beside it that are not read, in \
{num_files} files: its export has {exported:.1f} GiB and takes {extra_mib:.0f} MiB of resident \
memory above the model's.
"""


def main() -> None:
    """Run both sides and write the page; with --side run one of them, in this process."""
    parser = argparse.ArgumentParser(description="Measure opening and carrying published folders.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--carried", type=int, default=30, help="GiB of sparse files")
    parser.add_argument("--side", choices=(*SIDES, "carry"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure_side(options.side, options.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="opening-") as scratch:
        folder = Path(scratch) / "published"
        text_bytes = write_folder(folder, layers=options.layers, width=2048)
        size = sum(path.stat().st_size for path in folder.iterdir())
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        small = Path(scratch) / "carried"
        model_bytes = write_folder(small, layers=4, width=256)
        for _ in range(options.repeats):
            for side in SIDES:
                runs[side].append(run_side(side, folder))
                print(side, runs[side][-1], flush=True)
        num_files = write_sparse_files(small, options.carried)
        carry = run_side("carry", small)
        print("carry", carry, flush=True)
    page = TEXT.format(
        command=COMMAND,
        size=size / GIB,
        text=text_bytes / GIB,
        repeats=options.repeats,
        versions=describe_versions(),
        rows=format_rows(runs),
        model_mib=model_bytes / MIB,
        carried=options.carried,
        num_files=num_files,
        exported=carry["exported"] / GIB,
        extra_mib=carry["peak"] / MIB,
    )
    if options.output:
        options.output.write_text(page)
    print(page)


def format_rows(runs: dict[str, list[dict[str, float]]]) -> str:
    """Return a row of the table for each side: medians, and those of this library over its own."""
    titles = {
        "ours": "this library",
        "mapped": "transformers, files mapped",
        "copied": "transformers, weights copied",
    }
    medians = {
        side: [statistics.median(run[key] for run in runs[side]) for key in ("seconds", "peak")]
        for side in SIDES
    }
    rows = []
    for side, (seconds, peak) in medians.items():
        cells = [titles[side], f"{seconds:.2f}", f"{peak / GIB:.2f}"]
        our_seconds, our_peak = medians["ours"]
        cells += [f"{our_seconds / seconds:.2f}", f"{our_peak / peak:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def describe_versions() -> str:
    """Return `torch 2.13.0, transformers 5.3.0`."""
    import transformers

    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


def write_folder(folder: Path, *, layers: int, width: int) -> int:
    """Write a folder of random weights in bf16; return the bytes of its text model.

    layers: of the text model. width: of its hidden states.
    """
    import transformers

    config = transformers.CONFIG_MAPPING["qwen3_5"]()
    text = config.get_text_config()
    text.num_hidden_layers = layers
    text.layer_types = ["full_attention"] * layers
    text.hidden_size = width
    text.intermediate_size = 3 * width
    text.vocab_size = 64 * width
    text.tie_word_embeddings = config.tie_word_embeddings = False
    config.vision_config.depth = layers
    config.vision_config.hidden_size = width // 2
    config.vision_config.intermediate_size = 2 * width
    config.vision_config.out_hidden_size = width
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    save_file({"mtp.fc.weight": torch.randn(width, width).bfloat16()}, folder / "extra.safetensors")
    add_to_index(folder, {"mtp.fc.weight": "extra.safetensors"})
    return sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if "visual" not in name
    )


def add_to_index(folder: Path, files: dict[str, str]) -> None:
    """Add tensors to a folder's index; make one for a folder of a single file.

    files: name of a tensor -> the file that has it.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
    else:
        # A file of this name would be read alone.
        first = (folder / "model.safetensors").rename(folder / "first.safetensors")
        content = {"metadata": {}, "weight_map": dict.fromkeys(load_file(first), first.name)}
    content["weight_map"] |= files
    index.write_text(json.dumps(content))


def write_sparse_files(folder: Path, num_gib: int) -> int:
    """Write files of 1 GiB that take no room on the disk; return their number."""
    header = {"mtp.NUMBER.weight": {"dtype": "BF16", "shape": [GIB // 2], "data_offsets": [0, GIB]}}
    for number in range(num_gib):
        name = f"mtp.layers.{number}.weight"
        text = json.dumps(header).replace("mtp.NUMBER.weight", name).encode()
        file = folder / f"extra-{number:03}.safetensors"
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little"))
            stream.write(text)
            stream.truncate(8 + len(text) + GIB)
        add_to_index(folder, {name: file.name})
    return num_gib


def run_side(side: str, folder: Path) -> dict[str, float]:
    """Run a side in a process of its own; return what it measured."""
    command = [sys.executable, "-m", "benchmarks.opening", "--side", side, "--folder", str(folder)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return measured


def measure_side(side: str, folder: Path) -> dict[str, float]:
    """Measure seconds and the resident peak in bytes, above what is resident at the start."""
    open_folder: dict[str, Callable[[Path], Any]] = {
        "ours": open_ours,
        "mapped": open_with_transformers,
        "copied": open_and_copy,
    }
    if side == "carry":
        model, spec = open_ours(folder)
        out = folder.with_name("exported")
        start = reset_peak()
        export_model(
            model,
            spec=spec,
            source_config=read_config(folder),
            out=out,
            tokenizer_folder=None,
            max_shard_bytes=4 * GIB,
            world=SingleRank(),
            carried=find_carried(spec, folder, carries=True),
        )
        exported = sum(path.stat().st_size for path in out.iterdir())
        return {"peak": read_status("VmHWM") - start, "exported": exported}
    open_folder[side](folder.with_name("carried"))  # what is imported for the class
    for path in folder.glob("*.safetensors"):
        path.read_bytes()
    start = reset_peak()
    began = time.perf_counter()
    opened = open_folder[side](folder)
    seconds = time.perf_counter() - began
    del opened
    return {"seconds": seconds, "peak": read_status("VmHWM") - start}


def open_ours(folder: Path) -> tuple[Any, Any]:
    """Open a folder as a run does on one rank; return (model, its spec)."""
    spec = read_spec(read_config(folder), str(folder), "transformers")
    model = build_meta(spec, torch.bfloat16)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, folder)
    return model, spec


def open_with_transformers(folder: Path) -> Any:
    """Open a folder by its published class."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():  # a mapped file is read when its values are
        parameter.detach().view(-1)[::1024].sum()
    return model


def open_and_copy(folder: Path) -> Any:
    """Open a folder by its published class, with weights that are no pages of its files."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def reset_peak() -> int:
    """Let the peak begin at what is resident now, and return that in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS")


def read_status(key: str) -> int:
    """Return a size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
