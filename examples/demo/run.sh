#!/usr/bin/env bash
# The demo: the share of right answers before, a full fine-tune on the CPU, the share after, one completion.
# `make demo` calls it from the root of the clone with .venv/bin on PATH; $1 is the output folder.
set -euo pipefail
output="${1:-outputs/demo}"

# Matrices this small gain nothing from a second thread, and lose much by waiting for it on a busy machine.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "== before training"
python examples/demo/score.py

echo "== tune run full_finetune_distributed --config demo/full"
tune run full_finetune_distributed --config demo/full output_dir="$output" overwrite_output_dir=true

echo "== after training"
python examples/demo/score.py "$output/model" --show 5 --at-least 80

echo "== tune generate $output/model --prompt 'Write 4072 in words.'"
tune generate "$output/model" --prompt "Write 4072 in words."
echo "== curves: $output/report.html"
