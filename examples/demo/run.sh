#!/usr/bin/env bash
# The demo: a full fine-tune on the CPU, held-out questions answered before and after, one completion.
# `make demo` calls it from the root of the clone with .venv/bin on PATH; $1 is the output folder.
set -euo pipefail
output="${1:-outputs/demo}"

# Matrices this small gain nothing from a second thread, and lose much by waiting for it on a busy machine.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== tune run full_finetune_distributed --config demo/full checkpoint.keep_best=true"
tune run full_finetune_distributed --config demo/full output_dir="$output" overwrite_output_dir=true \
    checkpoint.keep_best=true checkpoint.best_metric=validation_exact_match "validation.metrics=[exact_match]"

echo "== tune eval $output: the untrained model (base) and the trained one"
tune eval "$output" --max-new-tokens 24

echo "== five of the answers, and at least 80 % right"
python examples/demo/score.py "$output/model" --show 5 --at-least 80

echo "== tune generate $output/model --prompt 'Write 4072 in words.'"
tune generate "$output/model" --prompt "Write 4072 in words."
echo "== curves: $output/report.html"
