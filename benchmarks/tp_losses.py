"""Compare losses of transformers' models on four tensor-parallel ranks with those of one process.

    python -m benchmarks.tp_losses --output docs/measurements/tp_losses.md

Each row is two runs of `tune run` with model.implementation=transformers on the CPU, from the same
weights on the same sequences: on one process, and with parallel.tensor=4, where the plan of how
each parameter is sharded is inferred. REALDATA_DIR names a folder with stories260K-hf.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from benchmarks.realdata import find_real_data
from benchmarks.tp_curve import find_largest_difference

ROOT = Path(__file__).parent.parent
STEPS = 100
RANKS = 4  # tensor-parallel
# SmolLM2-1.7B at an eighth of its width, with fewer layers and tokens. It has width 2048, 32 heads
# of 64, an MLP of 8192, 24 layers, 49,152 tokens; tied.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 130000.0,
    "tie_word_embeddings": True,
}
# GPT-2's class computes in the dtype of its weights throughout; Llama's norms are always in fp32.
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
REAL = "stories260K, real weights"
REAL_FOLDER = "stories260K-hf"  # in the folder that REALDATA_DIR names; 260,032 parameters
MODELS = {  # by name in the table: a config.json, with random weights; None: the real weights
    REAL: None,
    "SmolLM2's shape, random weights": SMOLLM2,
    "GPT-2's class, random weights": GPT2,
}

TEXT = """# Losses of inferred tensor-parallel plans

`{command}`, torch {torch}, transformers {transformers}, on the CPU (gloo).
It needs `REALDATA_DIR`, a folder with `{real}`.

Full fine-tuning with `model.implementation=transformers`, {steps} steps of AdamW on the demo's rows: one process, and
`parallel.tensor={ranks}` by the plan that is inferred. stories260K are real weights, 260,032 parameters, in
transformers' Llama class; the second model is of the same class, with the shape of SmolLM2 1.7B at an eighth of its
width (4 layers of width 256, 4 heads of 64, 512 tokens), the third of GPT-2's, as wide. Differences are relative, of
whichever step has the largest.

| model | type | first loss | last, one process | last, {ranks} ranks | losses differ by | gradient norms differ by |
|---|---|---:|---:|---:|---:|---:|
{rows}

The differences are those of sums in another order. In fp64 the Llama class still computes its norms in fp32: a last bit
there decides on 6e-8. GPT-2's class does not.
"""


def run_training(
    folder: Path, model: str, dtype: str, tensor: int, steps: int
) -> list[tuple[float, float]]:
    """Train with so many tensor-parallel ranks; return (loss, gradient norm) of every step.

    folder: for everything that is written. model: a key of MODELS. Raises CalledProcessError if the
    run fails.
    """
    output = folder / f"{dtype}-{tensor}"
    if model == REAL:
        weights = find_real_data(REAL_FOLDER)
        overrides = ["~model.preset", f"model.path={weights}", f"tokenizer.path={weights}"]
    else:
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        overrides = [f"model.preset={folder}/config.json"]
    overrides += [
        "model.implementation=transformers",
        f"dtype={dtype}",
        f"parallel.tensor={tensor}",
        "epochs=100",
        f"max_steps={steps}",
        "batch_size=4",
        "data.max_samples=400",
        "~validation",
        "optimizer.lr=1e-3",
        "checkpoint.save_model=false",
        f"output_dir={output}",
    ]
    command = [sys.executable, "-m", "recipe_lib", "run", "--nproc_per_node", str(tensor)]
    command += ["full_finetune_distributed", "--config", "demo/full", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def measure_row(model: str, dtype: str, steps: int) -> str:
    """Train on one process and on several ranks, and return a line of the table."""
    with tempfile.TemporaryDirectory(prefix="tp-losses-") as name:
        folder = Path(name)
        alone = run_training(folder, model=model, dtype=dtype, tensor=1, steps=steps)
        shared = run_training(folder, model=model, dtype=dtype, tensor=RANKS, steps=steps)
    assert len(alone) == steps
    losses, norms = zip(*alone, strict=True)
    shared_losses, shared_norms = zip(*shared, strict=True)
    cells = [
        model,
        dtype,
        f"{losses[0]:.6f}",
        f"{losses[-1]:.6f}",
        f"{shared_losses[-1]:.6f}",
        f"{find_largest_difference(shared_losses, losses):.1e}",
        f"{find_largest_difference(shared_norms, norms):.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    """Train every model in fp32 and fp64 and write the page."""
    options = argparse.ArgumentParser(description="losses of inferred tensor-parallel plans")
    options.add_argument("--output", type=Path, required=True)
    options.add_argument("--steps", type=int, default=STEPS)
    arguments = options.parse_args(argv)
    find_real_data(REAL_FOLDER)
    rows = []
    for model in MODELS:
        for dtype in ("fp32", "fp64"):
            rows.append(measure_row(model, dtype, arguments.steps))
            print(rows[-1], flush=True)
    command = shlex.join(["python", "-m", "benchmarks.tp_losses", *argv])
    page = TEXT.format(
        command=command,
        torch=torch.__version__,
        transformers=transformers.__version__,
        steps=arguments.steps,
        ranks=RANKS,
        rows="\n".join(rows),
        real=REAL_FOLDER,
    )
    arguments.output.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
