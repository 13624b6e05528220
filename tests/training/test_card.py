"""The results in the card of an export: what the metrics say, and nothing that differs between
equal runs.
"""

import json

import pytest

from recipe_lib.training.export_model import describe_results
from recipe_lib.training.records import build_step_metrics


def lines(kind: str, *gibs: float) -> list[dict]:
    """Metrics of a step for each peak, as read from their file; the last is validated too."""
    made = []
    for step, gib in enumerate(gibs, 1):
        peak = {"active": 0, "allocated": 0, "reserved": int(gib * 2**30), "kind": kind}
        made.append(
            build_step_metrics(
                step=step,
                epoch=step / 2,
                loss=1 / step,
                grad_norm=1.0,
                lr=0.1,
                seconds=0.5 * gib,
                label_tokens=1000,
                total_tokens=1500,
                devices=2,
                peak=peak,
            )  # fmt: skip
        )
    made[-1] |= {"validation_loss": 0.75, "validation_tokens": 9, "validation_accuracy": 0.5}
    return json.loads(json.dumps(made))


TRAINED = {
    "optimizer steps": "2",
    "label tokens": "2,000",
    "loss of the first step": "1.0000",
    "loss of the last step": "0.5000",
    "validation loss at the end": "0.7500",
    "validation accuracy": "0.5000",
}


def test_the_peak_of_a_device_is_the_largest_of_its_steps() -> None:
    assert describe_results(lines("device", 3.5, 2.0)) == {
        **TRAINED,
        "peak memory of a rank, measured": "3.50 GiB",
    }


@pytest.mark.parametrize("kind", ["resident set", "resident set since start"])
def test_the_memory_of_a_cpu_process_is_not_in_the_card(kind: str) -> None:
    assert describe_results(lines(kind, 3.5, 2.0)) == TRAINED
    assert describe_results(lines(kind, 1.0, 9.0)) == TRAINED
