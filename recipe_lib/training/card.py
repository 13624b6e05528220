"""The card of a run's export: its config, how it was trained, and the results that metrics.jsonl has of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_lib.checkpoint.model_card import model_card
from recipe_lib.config.local_files import base_name
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.reading import find_object
from recipe_lib.report.planned import planned_figures
from recipe_lib.training.records.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics
from recipe_lib.units import format_bytes


def run_card(
    cfg: FullFinetuneConfig,
    base_folder: Path | None,
    commands: list[str],
    *,
    is_adapter: bool,
    run: Path,
    step: int | None = None,
    exported: str | None = None,
) -> str:
    """The text. commands: what to do with the export. run: the folder with the run's metrics. step: the last one of
    what is exported; None: the run's. exported: why it is that one, where a best step was looked for."""
    path = run / METRICS_FILE
    lines = [line for line in (read_metrics(path) if path.is_file() else []) if step is None or line["step"] <= step]
    return model_card(
        cfg,
        base=base_name(cfg.model.path, base_folder) if cfg.model.path and base_folder else cfg.model.preset or "",
        base_folder=base_folder,
        lora=cfg.trained_adapters,
        is_adapter=is_adapter,
        commands=commands,
        plan=plan_of(cfg, lines) | planned_memory(run, lines),
        results=({"exported": exported} if exported else {}) | results_of(lines),
    )


def planned_memory(run: Path, lines: list[dict[str, Any]]) -> dict[str, str]:
    """What a rank's device was planned to take, where the run has taken it; empty without a plan. run: its folder."""
    if not any(line.get("memory_kind") == "device" for line in lines):
        return {}
    figures = planned_figures(run) or find_object(run / SUMMARY_FILE).get("planned")
    reserved = figures.get("reserved") if isinstance(figures, Mapping) else None
    return {"peak memory of a rank, planned": format_bytes(int(reserved))} if isinstance(reserved, (int, float)) else {}


def plan_of(cfg: FullFinetuneConfig, lines: list[dict[str, Any]]) -> dict[str, str]:
    """How it was trained, in words. lines: of metrics.jsonl."""
    steps = [line for line in lines if "loss" in line]
    many = cfg.gradient_accumulation_steps
    found = {"batch": f"batch_size {cfg.batch_size} x gradient_accumulation_steps {many} on each data rank"}
    found["sequences"] = f"up to {cfg.max_seq_len:,} tokens" + (", packed" if cfg.data.packing else "")
    found["optimizer"] = f"{cfg.optimizer.name}, learning rate {cfg.optimizer.lr:g}, then {cfg.lr_scheduler.type}"
    found["weights"] = cfg.dtype
    if cfg.qat is not None:
        scales = f"{cfg.qat_group_size} weights" if cfg.qat == "int4" else "each row"
        found["rounding"] = f"linears trained in {cfg.qat}, a scale for {scales}; saved are the weights before rounding"
    last: Mapping[str, Any] = steps[-1] if steps else {}
    if last.get("tokens_per_second_per_device"):
        found["devices"] = f"{round(last['tokens_per_second'] / last['tokens_per_second_per_device'])}"
    if last.get("epoch"):
        found["passes over the data"] = f"{last['epoch']:.3g}"
    return found


def results_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    """What the run has come to, in words; empty without its metrics. lines: of metrics.jsonl."""
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return {}
    losses = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    # Of devices only: the resident memory of a CPU process differs from run to run and tells another machine nothing.
    peaks = [line["peak_memory_reserved_gib"] for line in steps if line.get("memory_kind") == "device"]
    found = {
        "optimizer steps": f"{steps[-1]['step']:,}",
        "label tokens": f"{sum(line.get('label_tokens') or 0 for line in steps):,}",
        "loss of the first step": _number(steps[0].get("loss")),
        "loss of the last step": _number(steps[-1].get("loss")),
        "validation loss at the end": _number(losses[-1] if losses else None),
        "peak memory of a rank, measured": f"{max(peaks):.2f} GiB" if peaks else "",
        **_own_metrics(lines),
    }
    return {name: text for name, text in found.items() if text}


def _own_metrics(lines: list[dict[str, Any]]) -> Mapping[str, str]:
    """What else the last validation says, such as how often the chosen answer was preferred."""
    last: Mapping[str, Any] = next((line for line in reversed(lines) if "validation_loss" in line), {})
    return {name.replace("_", " "): _number(value) for name, value in last.items() if name.startswith("validation_")
            and name not in ("validation_loss", "validation_tokens")}  # fmt: skip


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) and abs(value) < float("inf") else ""
