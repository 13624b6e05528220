"""Measure tokenizing, masking and packing of 100,000 conversations, ours beside TRL's.

    python -m benchmarks.data_path --trl PYTHON --output docs/measurements/data_path.md

With `--against CHECKOUT` an earlier commit is measured beside this one instead. A side is what is
measured, in a process of its own. A row is a conversation of GSM8K with a number, so that no two
are alike; data and tokenizer are in REALDATA_DIR.
"""

import argparse
import gzip
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = 100_000
LENGTH = 2048  # tokens of a packed sequence
WORKERS = 2  # processes of each side that tokenize
COMMAND = "python -m benchmarks.data_path --trl PYTHON --output docs/measurements/data_path.md"
TEXT = """# The data path: tokenize, mask and pack {rows:,} rows

`{command}`: GSM8K's rows, Qwen 2.5's tokenizer and chat template, packs of {length} tokens, \
{workers} workers, median
of {repeats}. Cold: nothing is cached. Warm: the next start with the same rows.

| | cold, seconds | warm, seconds | most memory, MiB | tokens | trained tokens | packs | filled |
|---|---:|---:|---:|---:|---:|---:|---:|
{lines}

Tokens are those that are looked at: one fewer a row with us, whose labels are shifted when rows \
are made. TRL also
keeps, and trains, the line break behind each answer's end token. Seconds are of the whole \
process, imports
included; for rows alone: {inside}. Memory is that of the process and of its largest worker. \
Versions: {versions}.
"""

AGAINST = """# The data path against an earlier commit

`{command}`: {rows:,} rows of GSM8K as in
[data_path.md](data_path.md), {workers} workers, no cache. Both sides run in turn, {repeats} times \
each; a ratio is
the median over the pairs. Before: commit {before}. Seconds are of the whole process; CPU is that \
of all its processes;
memory that of the largest. Each row of `with columns` has an `id`, a `source` and a list of \
`tags` beside its messages.

| | before, s | now, s | ratio | before, CPU s | now, CPU s | ratio | before, MiB | now, MiB | \
ratio |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
{lines}
"""
AGAINST_COMMAND = (
    "python -m benchmarks.data_path --against CHECKOUT --output"
    " docs/measurements/data_path_before.md"
)
# Columns that no side reads. A row's number is a third one, `id`.
COLUMNS = {"source": "gsm8k", "tags": ["arithmetic", "words"]}


def main() -> None:
    """Run both sides and write the page; with --side run one of them, in this process."""
    parser = argparse.ArgumentParser(
        description="Measure tokenizing, masking and packing, ours beside TRL's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trl", type=Path, help="a Python that has trl")
    parser.add_argument("--against", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "trl"))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure_side(arguments.side, arguments.folder)))
        return
    from benchmarks.realdata import find_real_data  # the other side's Python has no package of ours

    find_real_data("tokenizers/qwen2_5")
    realdata = find_real_data("datasets/gsm8k").parents[1]
    if arguments.against:
        page = compare_with(
            arguments.against.resolve(),
            realdata=realdata,
            rows=arguments.rows,
            repeats=arguments.repeats,
        )
        print(page)
        if arguments.output:
            arguments.output.write_text(page)
        return
    pythons = {"ours": Path(sys.executable)}
    if arguments.trl:
        pythons["trl"] = arguments.trl
    names = {"ours": "tune-recipes", "trl": "TRL"}
    lines = []
    inside = []
    versions = []
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        write_rows(realdata, folder, arguments.rows)
        for side, python in pythons.items():
            seconds, report = run_side(
                side, python=python, folder=folder, repeats=arguments.repeats
            )
            filled = report["tokens"] / report["packs"] / LENGTH
            lines.append(
                f"| {names[side]} | {seconds['cold']:.1f} | {seconds['warm']:.1f} |"
                f" {report['mib']:.0f} | {report['tokens']:,} | {report['trained']:,} |"
                f" {report['packs']:,} | {filled:.2%} |"
            )
            inside.append(f"{names[side]} {report['inside']:.1f} s")
            versions.append(f"{names[side]}: {report['versions']}")
    text = TEXT.format(
        rows=arguments.rows,
        command=COMMAND,
        length=LENGTH,
        workers=WORKERS,
        repeats=arguments.repeats,
        lines="\n".join(lines),
        inside=", ".join(inside),
        versions=", ".join(versions),
    )
    arguments.output.write_text(text)


def write_rows(
    realdata: Path, folder: Path, rows: int, columns: dict[str, Any] | None = None
) -> None:
    """Write the rows for both sides, and the tokenizer, into a folder.

    ours.jsonl has `messages`, trl.jsonl `prompt` and `completion`. columns: further columns of
    ours.jsonl, with which each row also gets its number as `id`; empty or None: none.
    """
    source = (realdata / "datasets/gsm8k/train.jsonl").read_text().splitlines()
    with open(folder / "ours.jsonl", "w") as ours, open(folder / "trl.jsonl", "w") as theirs:
        for number in range(rows):
            row = json.loads(source[number % len(source)])
            question = {"role": "user", "content": f"{number}. {row['question']}"}
            answer = {"role": "assistant", "content": row["answer"]}
            unused = {"id": number} | columns if columns else {}
            ours.write(json.dumps({"messages": [question, answer]} | unused) + "\n")
            theirs.write(json.dumps({"prompt": [question], "completion": [answer]}) + "\n")
    (folder / "tokenizer").mkdir()
    for path in (realdata / "tokenizers/qwen2_5").iterdir():
        data = path.read_bytes()
        (folder / "tokenizer" / path.name.removesuffix(".gz")).write_bytes(
            gzip.decompress(data) if path.suffix == ".gz" else data
        )


def compare_with(before: Path, realdata: Path, rows: int, repeats: int) -> str:
    """Measure the checkout `before` and this one in turn, and return the page.

    repeats: runs of each. Measured are `measure_side` of ours and `tune data check`.
    """
    lines = []
    checkouts = {"before": before, "now": Path(__file__).resolve().parents[1]}
    for name, columns in (("messages alone", {}), ("with columns", COLUMNS)):
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name)
            write_rows(realdata, folder=folder, rows=rows, columns=columns)
            tokenize = ["-m", "benchmarks.data_path", "--side", "ours", "--folder", folder_name]
            check = ["-m", "recipe_lib", "data", "check", *build_check_words(folder)]
            commands = {"tokenize, mask and pack": tokenize, "`tune data check`": check}
            for work, words in commands.items():
                runs: dict[str, list[tuple[float, ...]]] = {side: [] for side in checkouts}
                for _ in range(repeats):
                    for side, checkout in checkouts.items():
                        # Else the second run would find the first one's tokens.
                        shutil.rmtree(folder / "cache", ignore_errors=True)
                        runs[side].append(measure_process(words, checkout, folder))
                cells = format_medians(runs["before"], runs["now"])
                lines.append(f"| {work}, {name} | {' | '.join(cells)} |")
    commit = subprocess.run(
        ["git", "-C", before, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
    )
    return AGAINST.format(
        command=AGAINST_COMMAND,
        rows=rows,
        workers=WORKERS,
        repeats=repeats,
        before=commit.stdout.strip(),
        lines="\n".join(lines),
    )


def format_medians(before: list[tuple[float, ...]], now: list[tuple[float, ...]]) -> list[str]:
    """Return medians before and now and their ratio, of seconds, CPU seconds and MiB, as cells.

    before, now: the tuples of `measure_process`, one a repetition. The ratio is the median over the
    pairs of runs.
    """
    cells = []
    for number, digits in enumerate((1, 1, 0)):  # seconds, CPU seconds, MiB
        old = [run[number] for run in before]
        new = [run[number] for run in now]
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        cells.append(f"{statistics.median(old):.{digits}f}")
        cells.append(f"{statistics.median(new):.{digits}f}")
        cells.append(f"{ratio:.3f}")
    return cells


def measure_process(words: list[str], checkout: Path, folder: Path) -> tuple[float, float, float]:
    """Run Python in a checkout; return (seconds, CPU seconds, MiB of its largest process).

    words: Python's arguments. folder: for its output. Exits with that output if Python fails.
    """
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    with open(folder / "said", "w+b") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=checkout,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        # Not `process.wait`: only this call returns the usage, that of its ended workers included.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        if status:
            output.seek(0)
            sys.exit(f"{checkout}: {' '.join(words)}: {output.read().decode(errors='replace')}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def run_side(
    side: str, python: Path, folder: Path, repeats: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Run a side `repeats` times cold (without a cache) and warm (with the one just made).

    python: the side's interpreter. Returns (median seconds by `cold` and `warm`, the report of the
    last cold process with the median of `inside`). Exits with the output of a run that failed.
    """
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    cold_report: dict[str, Any] = {}
    inside = []
    for _ in range(repeats):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        for kind in seconds:
            # TRL's rows are cached below HF_HOME, ours in the same folder by data.cache_dir.
            environment = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
            command = [str(python), "-m", "benchmarks.data_path"]
            command += ["--side", side, "--folder", str(folder)]
            began = time.perf_counter()
            completed = subprocess.run(command, env=environment, capture_output=True, text=True)
            if completed.returncode:
                sys.exit(f"{side}: {completed.stderr}")
            seconds[kind].append(time.perf_counter() - began)
            if kind == "cold":
                cold_report = json.loads(completed.stdout.splitlines()[-1])
                inside.append(cold_report["inside"])
    cold_report["inside"] = sorted(inside)[len(inside) // 2]
    medians = {kind: sorted(values)[len(values) // 2] for kind, values in seconds.items()}
    return medians, cold_report


def measure_side(side: str, folder: Path) -> dict[str, Any]:
    """Run a side in this process; return its dict, with `mib` of peak memory added."""
    report = run_ours(folder) if side == "ours" else run_trl(folder)
    # Of this process, and of its largest worker.
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_kib += resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return report | {"mib": peak_kib / 1024}


def build_check_words(folder: Path) -> list[str]:
    """Return the config's name and the overrides for `tune data check` and for a run."""
    return [
        "qwen2_5/0.5B_full",
        "~model.path",
        "model.preset=qwen2_5/0.5B",
        f"tokenizer.path={folder}/tokenizer",
        f"data.source={folder}/ours.jsonl",
        "data.format=messages",
        "data.packing=true",
        f"data.num_proc={WORKERS}",
        f"data.cache_dir={folder}/cache",
        f"max_seq_len={LENGTH}",
        "device=cpu",
        "batch_size=1",
        "gradient_accumulation_steps=1",
    ]


def run_ours(folder: Path) -> dict[str, Any]:
    """Prepare the rows by the recipe's own calls.

    Returns `inside` (seconds without imports), `tokens`, `trained` (label tokens), `packs` (packed
    sequences) and `versions`.
    """
    # Inside, since TRL's environment has no such package.
    import recipe_lib
    from recipe_lib.config import load_config
    from recipe_lib.parallel import start_world
    from recipe_lib.training.resolve_model import resolve_model
    from recipe_lib.training.training_data import TrainingData, prepare_data

    began = time.perf_counter()
    config, *overrides = build_check_words(folder)
    cfg = load_config(config, [*overrides, f"output_dir={folder}/run"])
    prepare_data(cfg)
    with start_world(cfg) as world:
        data = TrainingData(cfg, resolve_model(cfg.model), world)
        packs = data.plan.count_steps(0)  # of one pack each
    report = data.dataset.report
    return {
        "inside": time.perf_counter() - began,
        "tokens": report.tokens,
        "trained": round(report.tokens * report.label_token_fraction),
        "packs": packs,
        "versions": f"{recipe_lib.__version__}",
    }


def run_trl(folder: Path) -> dict[str, Any]:
    """Prepare the rows by making TRL's trainer, which does so in its constructor.

    Returns the keys of `run_ours`.
    """
    import datasets
    import transformers
    import trl as library
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = datasets.load_dataset("json", data_files=str(folder / "trl.jsonl"), split="train")
    # The trainer takes a model; this one costs no time.
    model_config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=512,
    )
    settings = library.SFTConfig(
        output_dir=str(folder / "run"),
        packing=True,
        max_length=LENGTH,
        dataset_num_proc=WORKERS,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = library.SFTTrainer(
        model=LlamaForCausalLM(model_config),
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    packed = trainer.train_dataset
    seconds = time.perf_counter() - began
    lengths = [len(input_ids) for input_ids in packed["input_ids"]]
    num_label_tokens = 0  # tokens that the loss counts
    # Trained tokens are marked in the one column or in the other.
    if "completion_mask" in packed.column_names:
        num_label_tokens = sum(sum(mask) for mask in packed["completion_mask"])
    else:
        for labels in packed["labels"]:
            num_label_tokens += sum(label != -100 for label in labels)
    return {
        "inside": seconds,
        "tokens": sum(lengths),
        "trained": int(num_label_tokens),
        "packs": len(lengths),
        "versions": (
            f"{library.__version__}, transformers {transformers.__version__}, datasets"
            f" {datasets.__version__}"
        ),
    }


if __name__ == "__main__":
    main()
