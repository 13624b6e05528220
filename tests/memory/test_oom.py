"""Out of memory becomes one line with the levers that are left."""

import pytest
import torch

from recipe_lib.config import FullFinetuneConfig
from recipe_lib.errors import OUT_OF_MEMORY, OutOfMemoryError
from recipe_lib.memory.oom import explain_out_of_memory, levers
from recipe_lib.memory.peaks import PeakMemory


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
    assert "memory.activation_checkpointing=full" in levers(cfg)
    cfg.memory.activation_checkpointing = "full"
    cfg.memory.cpu_offload = True
    cfg.memory.loss_chunks = 32
    assert levers(cfg) == ["max_seq_len=1024"]
    cfg.parallel.wrapping = "layers"
    assert levers(cfg)[0] == "parallel.wrapping=memory_efficient"


def test_other_errors_pass() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        explain_out_of_memory("step", FullFinetuneConfig(), PeakMemory(torch.device("cpu"))),
    ):
        raise ZeroDivisionError
