"""The records of a run: metrics.jsonl, one JSON object a line, and summary.json at its end.

`build_step_metrics` makes the line of a step, `compute_expert_load` its numbers of a mixture of
experts, `MetricsFile` writes lines and `read_metrics` reads them back. A number that is not finite
is written as `null`, so that every line is JSON that any reader takes.
"""

import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recipe_lib
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.files import LineFile, replace_text, report_storage_faults
from recipe_lib.models.mixture import Mixture
from recipe_lib.parallel.world import World
from recipe_lib.reading import parse_json, read_bytes
from recipe_lib.redaction import redact
from recipe_lib.units import convert_to_gib

METRICS_FILE = "metrics.jsonl"
METRICS_LIMIT = 2**31  # bytes; a step has some 500
SUMMARY_FILE = "summary.json"


def build_step_metrics(
    *,
    step: int,
    epoch: float,
    loss: float,
    grad_norm: float,
    lr: float,
    seconds: float,
    label_tokens: int,
    total_tokens: int,
    devices: int,
    peak: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the line of one optimizer step.

    step: steps done, this one included. epoch: passes over the data done, a fraction within one.
    seconds: wall time of the step. label_tokens: labeled tokens of the global step; total_tokens:
    its tokens without padding. peak: `active`, `allocated`, `reserved` in bytes and `kind`, as
    `PeakMemory.read()` returns.
    """
    rate = total_tokens / seconds if seconds > 0 else 0.0
    return {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / devices,
        "label_tokens": label_tokens,
        "label_token_fraction": label_tokens / total_tokens if total_tokens else 0.0,
        **{
            f"peak_memory_{name}_gib": convert_to_gib(peak[name])
            for name in ("active", "allocated", "reserved")
        },
        "memory_kind": peak["kind"],
        "seconds": seconds,
        "tokens": total_tokens,
    }


def compute_expert_load(
    model: nn.Module, world: World, cfg: FullFinetuneConfig
) -> dict[str, Tensor]:
    """Return the numbers of the step that ends, on the device, and begin to count anew. Collective.

    Empty for a model without experts, or with compiled layers. Of a pipeline all ranks have the
    same, whatever their layers.

    `expert_load_max_over_mean`: tokens of the busiest expert over those of the average one, of the
    layer where that is most. `dropped_tokens`: choices that no expert computed. `router_aux_loss`:
    the mean over layers and micro-batches, where there is one.
    """
    mixture = getattr(getattr(model, "spec", None), "mixture", None)
    if mixture is None or cfg.compile:
        return {}
    rows = torch.zeros(
        len(mixture.layers), mixture.num_experts, dtype=torch.int64, device=world.device
    )
    # Sum of the balance losses; choices; forwards that the losses are of.
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)
    for name, module in model.named_modules():
        if not isinstance(module, Mixture) or module.load is None:
            continue
        load = module.load
        layer = next(
            part for part in name.split(".") if part.isdecimal()
        )  # of `model.layers.3.mlp`
        rows[int(layer)] = load.rows
        loss = load.loss.clone()
        if world.tensor is not None:
            # Ranks that share tokens know a part of the loss each.
            dist.all_reduce(loss, group=world.mesh["tensor"].get_group())
        totals += torch.stack([loss, *loss.new_tensor([load.expected, load.calls])])
        load.clear()
    world.sum_over_sequence(rows)
    world.sum_over_sequence(totals[:2])  # each rank of a sequence has as many calls
    world.all_reduce_sum(rows)
    world.all_reduce_sum(totals)
    layer_rows = rows[list(mixture.layers)].double()
    load_ratios = layer_rows.amax(dim=1) / layer_rows.mean(dim=1).clamp(min=1e-9)
    metrics = {
        "expert_load_max_over_mean": load_ratios.max(),
        "dropped_tokens": totals[1] - rows.sum(),
    }
    if cfg.router_aux_loss_coef:
        metrics["router_aux_loss"] = totals[0] / totals[2].clamp(min=1)
    return metrics


class MetricsFile:
    """`metrics.jsonl` of a run: appended line by line, cut back to a step when a run resumes."""

    def __init__(self, output_dir: Path) -> None:
        """Write nothing until the first `append`. output_dir: an existing folder."""
        self.path = Path(output_dir) / METRICS_FILE
        self._file: LineFile | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line. Raise StorageError when the disk refuses it."""
        data = (_encode_line(line) + "\n").encode()
        with report_storage_faults():
            if self._file is None:
                self._file = LineFile(self.path)
            # Through to the operating system: a killed process loses no step that was recorded.
            self._file.append(data)

    def truncate(self, step: int) -> None:
        """Drop the lines after `step`, and a last line that a kill has torn; 0 empties the file.

        For a run that goes on from the state of `step`.
        """
        self.close()
        if self.path.exists():
            lines = [line for line in read_metrics(self.path) if line["step"] <= step]
            # All or nothing: a kill in the middle loses none of the lines that stay.
            replace_text(self.path, "".join(_encode_line(line) + "\n" for line in lines))

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, or of the one in a folder.

    Lines that are torn or are no object are left out.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    lines = []
    for text in read_bytes(path, METRICS_LIMIT).split(b"\n"):
        try:
            line = parse_json(text)
        except ValueError:  # of JSON or of UTF-8: torn
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def read_run_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; none if it has not written one."""
    path = output_dir / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


def write_summary(
    output_dir: Path,
    status: str,
    settings: Mapping[str, Any],
    *,
    wall_seconds: float,
    total_steps: int,
    world_size: int,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write summary.json from the run's metrics.jsonl and return what it wrote.

    status: `done`, `stopped early`, `stopped`, `diverged` or `failed`. settings: the resolved
    config as a dict. wall_seconds: of this process, set-up included; the seconds of the steps,
    those before a resume included, are summed from the metrics. facts: `data`, `planned` and
    `changed_settings`, as far as they are known, and what `BestStep` says.
    """
    lines = read_run_metrics(Path(output_dir))
    steps = [line for line in lines if "loss" in line]
    validations = [
        line["validation_loss"] for line in lines if line.get("validation_loss") is not None
    ]
    memory = {
        name: max((line[name] for line in steps if line.get(name) is not None), default=None)
        for name in (f"peak_memory_{kind}_gib" for kind in ("active", "allocated", "reserved"))
    }
    summary = {
        "status": status,
        "steps": steps[-1]["step"] if steps else 0,
        "total_steps": total_steps,
        "first_loss": steps[0]["loss"] if steps else None,
        "final_loss": steps[-1]["loss"] if steps else None,
        "final_validation_loss": validations[-1] if validations else None,
        "best_validation_loss": min(validations, default=None),
        "tokens": sum(line.get("tokens") or 0 for line in steps),
        "label_tokens": sum(line.get("label_tokens") or 0 for line in steps),
        "training_seconds": sum(line.get("seconds") or 0 for line in steps),
        "wall_seconds": wall_seconds,
        **memory,
        "memory_kind": steps[-1].get("memory_kind") if steps else None,
        "world_size": world_size,
        "versions": list_versions(),
        **(facts or {}),
        "settings": settings,
    }
    text = redact(
        json.dumps(_replace_non_finite(summary), indent=2, allow_nan=False, ensure_ascii=False)
    )
    replace_text(Path(output_dir) / SUMMARY_FILE, text + "\n")
    return json.loads(text)


def list_versions() -> dict[str, str]:
    """Return the versions of the software that a result depends on."""
    versions = {
        "tune-recipes": recipe_lib.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _encode_line(line: Mapping[str, Any]) -> str:
    return redact(json.dumps(_replace_non_finite(line), allow_nan=False, ensure_ascii=False))


def _replace_non_finite(value: Any) -> Any:
    """Return the value with numbers that are not finite replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _replace_non_finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
