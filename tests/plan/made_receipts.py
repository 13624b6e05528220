"""Build receipts, and the files of a run to make one of, for tests.

A receipt records the planned and the measured memory and time of a run.
"""

from typing import Any

from recipe_lib.plan.measured.receipts import FORMAT, Receipt, ReceiptRun
from recipe_lib.units import GIB


def build_run(settings: dict[str, str] | None = None, **changed: Any) -> ReceiptRun:
    """Return the description of a run of Llama 3 8B with LoRA on one RTX 4090.

    settings: added to the run's own. changed: fields to replace.
    """
    fields: dict[str, Any] = {
        "recipe": "lora_finetune_distributed",
        "config": "llama3/8B_lora",
        "card": "rtx4090",
        "card_memory": 25 * 10**9,
        "ranks": 1,
        "settings": {
            "model": "meta-llama/Meta-Llama-3-8B",
            "mesh": "one rank",
            "sequence": "512",
            "batch_size": "1",
            "gradient_accumulation_steps": "8",
            "dtype": "bf16",
            "memory.activation_checkpointing": "full",
            **(settings or {}),
        },
    }
    return ReceiptRun(**(fields | changed))


def build_receipt(
    planned: float = 15.21,
    measured: float = 15.43,
    time: str = "2026-11-20T09:15:00+01:00",
    rates: tuple[float | None, float | None] = (1700.0, 1900.0),
    **changed: Any,
) -> Receipt:
    """Return a receipt of `build_run(**changed)`.

    planned, measured: GiB reserved. time: when the run ended. rates: tokens a second, planned and
    measured; None: not known.
    """
    sizes = (int(planned * GIB), int(measured * GIB))
    figures = []  # planned, then measured; bytes and seconds
    for size, rate in zip(sizes, rates, strict=True):
        figures.append(
            {"active": size - 2 * GIB, "allocated": size - GIB, "reserved": size, "seconds": 2.5}
        )
        if rate is not None:
            figures[-1]["tokens_per_second"] = rate
    versions = {"tune-recipes": "0.1.0", "torch": "2.13.0"}
    planned_figures, measured_figures = figures
    return Receipt(
        format=FORMAT,
        time=time,
        versions=versions,
        run=build_run(**changed),
        planned=planned_figures,
        measured=measured_figures,
    )


def build_run_files(
    **changed: Any,
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return (figures of the plan, summary, lines of metrics.jsonl) of a run of 4 steps on a GPU.

    The first step is far slower than the others. changed: figures of the plan to replace.
    """
    figures: dict[str, Any] = {
        "active": 11 * GIB,
        "allocated": 12 * GIB,
        "reserved": 13 * GIB,
        "first": None,
        "seconds": 2.0,
        "tokens_per_second": 2048.0,
        "own_device": True,
        "run": vars(build_run()),
    }
    summary = {
        "peak_memory_active_gib": 10.0,
        "peak_memory_allocated_gib": 11.0,
        "peak_memory_reserved_gib": 12.0,
        "memory_kind": "device",
        "versions": {"torch": "2.13.0", "platform": "Linux-host-of-alice"},
    }
    steps = [
        {"step": step, "loss": 1.0, "seconds": seconds, "tokens_per_second": 5000 / seconds}
        for step, seconds in enumerate((60.0, 2.5, 2.6, 2.4), 1)
    ]
    return figures | changed, summary, [{"step": 0, "validation_loss": 2.0}, *steps]
