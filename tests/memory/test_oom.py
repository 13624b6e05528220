"""Out of memory becomes one line with the levers that are left."""

import pytest
import torch

from recipe_lib.config import FullFinetuneConfig
from recipe_lib.errors import OUT_OF_MEMORY, OutOfMemoryError
from recipe_lib.memory.peaks import PeakMemory, explain_out_of_memory, list_levers


def test_the_line_names_phase_peak_and_levers() -> None:
    cfg = FullFinetuneConfig(batch_size=4)
    with (
        pytest.raises(OutOfMemoryError) as caught,
        explain_out_of_memory("training step", cfg, PeakMemory(torch.device("cpu"))),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    line = str(caught.value)
    assert line.startswith("training step: out of memory on cpu with ")
    assert "; next lever: batch_size=2 with gradient_accumulation_steps x 2; " in line
    assert "\n" not in line
    assert caught.value.exit_code == OUT_OF_MEMORY


def test_levers_already_pulled_are_not_named() -> None:
    cfg = FullFinetuneConfig()
    assert "memory.activation_checkpointing=full" in list_levers(cfg)
    cfg.memory.activation_checkpointing = "full"
    cfg.memory.cpu_offload = cfg.memory.activation_offload = True
    cfg.memory.loss_chunks = 32
    assert list_levers(cfg) == ["max_seq_len=1024"]
    cfg.parallel.fsdp_wrap_policy = "layers"
    assert list_levers(cfg)[0] == "parallel.fsdp_wrap_policy=memory_efficient"


@pytest.mark.parametrize(("batch_size", "smaller", "factor"), [(2, 1, 2), (3, 1, 3), (9, 3, 3)])
def test_smaller_micro_batches_keep_the_global_batch(
    batch_size: int, smaller: int, factor: int
) -> None:
    lever = f"batch_size={smaller} with gradient_accumulation_steps x {factor}"
    assert list_levers(FullFinetuneConfig(batch_size=batch_size))[0] == lever


def test_one_sequence_of_one_token_is_not_made_smaller() -> None:
    levers = list_levers(FullFinetuneConfig(batch_size=1, max_seq_len=1))
    assert levers and not any(lever.startswith(("batch_size", "max_seq_len")) for lever in levers)


def test_levers_of_a_pipeline() -> None:
    cfg = FullFinetuneConfig(batch_size=4, gradient_accumulation_steps=4)
    cfg.parallel.pipeline, cfg.parallel.pipeline_schedule = 2, "gpipe"
    expected = [
        "parallel.pipeline_schedule=1f1b",
        "parallel.pipeline_balance=memory",
        "batch_size=2 with ",
    ]
    assert [
        found.startswith(lever) for found, lever in zip(list_levers(cfg), expected, strict=False)
    ] == [True] * 3
    cfg.parallel.pipeline_schedule, cfg.parallel.pipeline_layers_per_stage = "1f1b", [9, 7]
    cfg.parallel.pipeline_microbatches = 4  # of 4 rows each, whatever batch_size is
    assert list_levers(cfg)[:2] == [
        "parallel.pipeline_microbatches=8",
        "memory.activation_checkpointing=full",
    ]
    cfg.batch_size, cfg.parallel.pipeline_microbatches = 3, 4
    assert list_levers(cfg)[0] == "parallel.pipeline_microbatches=12"


def test_other_errors_pass() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        explain_out_of_memory("step", FullFinetuneConfig(), PeakMemory(torch.device("cpu"))),
    ):
        raise ZeroDivisionError
