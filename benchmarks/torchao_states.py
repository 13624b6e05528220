"""Low-bit optimizer states on several ranks, ours and torchao's: their bytes, and what other numbers of ranks load."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.models import build_meta, spec_from_config
from recipe_lib.models.spec import preset_config
from recipe_lib.optim.low_bit_adamw import ADAMW_STATES, layouts
from recipe_lib.optim.optimizers import build_optimizer
from recipe_lib.units import MIB
from tests.distributed.ranks import run_ranks
from tests.torchao_oracle import low_bit_adamw

CFG = replace(OptimizerConfig(lr=1e-2), state_bits=8)
BLOCK, LEAST = 256, 4096  # of torchao's AdamW8bit: a part is in 8 bits if it is whole blocks and has so many elements
MATRICES = {"q": (896, 896), "k": (128, 896), "up": (4864, 896), "down": (896, 4864)}  # of Qwen2.5 0.5B
STEPS = 5
RANKS = (1, 2, 3, 4)


def state_bytes() -> list[str]:
    """Rows of a table: bytes of both states on the first of N ranks, and how many matrices torchao has in 8 bits."""
    model = build_meta(spec_from_config(preset_config("qwen2_5/0.5B"), "qwen2_5/0.5B"), torch.bfloat16)
    matrices = sum(parameter.dim() == 2 for parameter in model.parameters())
    rows = []
    for ranks in (1, 2, 3, 4, 5, 6, 7, 8):
        ours = theirs = rounded = 0
        for parameter in model.parameters():
            part = -(-parameter.shape[0] // ranks) * parameter[0].numel()  # as FSDP cuts it
            found = layouts(parameter, ADAMW_STATES, 8, master=False)
            ours += sum(part // layout.per * layout.dtype.itemsize for layout in found.values())
            fits = part >= LEAST and part % BLOCK == 0
            theirs += 2 * (part + part // BLOCK * 4 if fits else part * parameter.element_size())
            rounded += fits and parameter.dim() == 2
        rows.append(f"| {ranks} | {ours / MIB:.1f} MiB | {theirs / MIB:.1f} MiB | {rounded} of {matrices} |")
    return rows


def loads() -> list[str]:
    """Rows of a table: states saved on some ranks, loaded on others."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        expected = {ours: run_ranks(saved, 1, ours, Path(folder) / f"{ours}-1")[0] for ours in (True, False)}
        for first in RANKS:
            for ours in (True, False):
                if first > 1:
                    run_ranks(saved, first, ours, Path(folder) / f"{ours}-{first}")
            for second in RANKS:
                if first != second:
                    cells = [
                        run_ranks(loaded, second, ours, Path(folder) / f"{ours}-{first}", expected[ours])[0]
                        for ours in (True, False)
                    ]
                    rows.append(f"| {first} | {second} | {' | '.join(cells)} |")
    return rows


def stepped(ours: bool, steps: int) -> dict[str, Any]:
    """States of the matrices by name after so many steps; sharded by rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    params = {name: nn.Parameter(made(name, 0, mesh)) for name in MATRICES}
    if ours:
        optimizer: Any = build_optimizer(CFG, params.items(), torch.device("cpu"))
    else:
        torch.compiler.set_stance("force_eager")
        optimizer = low_bit_adamw()[8](params.values(), lr=CFG.lr)
    for step in range(1, steps + 1):
        for name, parameter in params.items():
            parameter.grad = made(name, step, mesh)
        optimizer.step()
    kept = {name: dict(optimizer.state[parameter]) for name, parameter in params.items()}
    return {
        name: {key: value for key, value in state.items() if isinstance(value, DTensor)} for name, state in kept.items()
    }


def made(name: str, step: int, mesh: DeviceMesh) -> DTensor:
    """Weights (step 0), or a step's gradient."""
    generator = torch.Generator().manual_seed(1000 * step + list(MATRICES).index(name))
    return distribute_tensor(torch.randn(MATRICES[name], generator=generator), mesh, [Shard(0)])


def codes(states: dict[str, Any], ours: bool) -> dict[str, Tensor]:
    """The 8-bit codes of each state, gathered; empty where a rank keeps the state as numbers."""
    found = {}
    for name, state in states.items():
        for key in ADAMW_STATES:
            local = state[f"{key}_codes" if ours else key].to_local()
            mine = local if ours else getattr(local, "codes", torch.empty(0, dtype=torch.uint8))
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, mine.clone())
            found[f"{name} {key}"] = torch.cat([part.flatten() for part in parts])
    return found


def saved(ours: bool, folder: Path) -> dict[str, Tensor]:
    """Saves what some steps leave; the codes."""
    states = stepped(ours, STEPS)
    dcp.save(states, checkpoint_id=folder)
    return codes(states, ours)


def loaded(ours: bool, folder: Path, expected: dict[str, Tensor]) -> str:
    """What became of them on these ranks."""
    states = stepped(ours, 1)
    try:
        dcp.load(states, checkpoint_id=folder)
    except CheckpointException as error:
        fault = next(iter(error.failures.values()))[0]
        return f"{type(fault).__name__}: {str(fault).partition('. ')[0]}"
    found = codes(states, ours)
    whole = sum(len(values) for values in expected.values())
    same = sum(int((found[key] == expected[key]).sum()) for key in expected if found[key].shape == expected[key].shape)
    return f"{100 * same / whole:.1f} % of the codes"
