"""Tasks of lm-evaluation-harness (extra `eval`) on our own model object, without an export."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from recipe_lib.config.local_files import install_line
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.evaluation.harness_model import HarnessMethods

if TYPE_CHECKING:
    from lm_eval.api.model import LM


def run_tasks(
    model: "LM", tasks: Sequence[str], *, include_path: str | None, num_fewshot: int | None, limit: int | None
) -> dict[str, Any]:
    """What the harness reports: task -> metric -> number. ConfigError for a task that it does not know."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if any(name not in manager.all_tasks for name in tasks):  # its own are thousands of files to look at
        manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            hint = did_you_mean(name, manager.all_tasks) or "; `lm-eval ls tasks` lists them, --include-path adds yours"
            raise ConfigError(f"--lm-eval: unknown task {show(name)}{hint}")
    found = simple_evaluate(
        model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False,
        bootstrap_iters=1000,
    )  # fmt: skip
    return {} if found is None else dict(found["results"])


def metric_rows(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """(task, metric) -> number, of what `run_tasks` gives; standard errors and names are left out."""
    rows = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, way = key.partition(",")
            if isinstance(value, int | float) and not name.endswith("_stderr") and name not in ("alias", "sample_len"):
                rows[task, name if way in ("", "none") else f"{name} ({way})"] = float(value)
    return rows


def harness_model(model: torch.nn.Module, **options: Any) -> "LM":
    """Our model as the harness asks it; options: of `HarnessMethods`. SetupError without the extra `eval`."""
    try:
        from lm_eval.api.model import TemplateLM
    except ModuleNotFoundError as error:
        raise SetupError(f"--lm-eval: lm-evaluation-harness is not installed; {install_line('eval')}") from error

    class HarnessModel(HarnessMethods, TemplateLM):
        """Both."""

    return HarnessModel(model, **options)
