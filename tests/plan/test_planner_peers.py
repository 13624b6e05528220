"""Rows of other planners: the page has every row of the data, its means are those of its rows, and the imitated stack
issues the operators of the libraries that it stands for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import planner_peers
from benchmarks.peer_stacks import LoraLinear, Nf4Linear, PeerRun, build_model
from benchmarks.peer_traces import STEP, trace_run
from benchmarks.planner_peers import DIGITS, METRICS, UNITS
from recipe_lib.plan.allocation.replay import PhaseReplay, replay
from tests.plan.apart import apart

pytestmark = pytest.mark.benchmark

PAGE = Path(__file__).parents[2] / "docs/measurements/planner_peers.md"
SIZES = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def cells(line: str) -> list[str]:
    """Of a line of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def sections() -> dict[str, list[list[str]]]:
    """Lines of the page's tables, by heading."""
    found: dict[str, list[list[str]]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## "):
        title, *lines = part.splitlines()
        found[title.lstrip("# ")] = [cells(line) for line in lines if line.startswith("| ")][2:]
    return found


def test_the_page_has_every_row() -> None:
    page, count = sections(), 0
    for group in planner_peers.read_rows()["groups"]:
        unit, digits = UNITS[group["unit"]], DIGITS[group["unit"]]
        expected = []
        for row in group["rows"]:
            for metric, measured in row["measured"].items():
                theirs = row["theirs"].get(metric)
                said = ["", ""]
                if theirs is not None:
                    said = [f"{theirs / unit:.{digits}f}", f"{theirs / measured - 1:+.2%}"]
                expected.append([row["name"], METRICS[metric], f"{measured / unit:.{digits}f}", *said])
                count += 1
            assert group["source"] and group["stack"] and group["notes"]
            planner_peers.run_of(group, row)
        assert [line[:5] for line in page[group["title"]]][: len(expected)] == expected
    assert count >= 40


def test_means_are_those_of_the_rows() -> None:
    page = sections()
    summary = page["Rows of other planners"]
    assert len(summary) > 10
    for title, metric, rows, *sides in summary:
        lines = [line for line in page[title] if line[1] == metric]
        assert int(rows) == len(lines)
        for place, (mean, worst) in ((4, sides[:2]), (6, sides[2:])):
            errors = [float(line[place].rstrip("%")) for line in lines if line[place]]
            if errors:
                assert float(mean.rstrip("%")) == pytest.approx(sum(map(abs, errors)) / len(errors), abs=0.0101)
                assert float(worst.rstrip("%")) in errors and abs(float(worst.rstrip("%"))) == max(map(abs, errors))
            else:
                assert (mean, worst) == ("", "")


class Issued(TorchDispatchMode):
    """Names of operators, with the types and shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.found.append((func._schema.name, result.dtype, result.shape))
        return result


def test_adapters_issue_the_operators_of_peft() -> None:
    def issued(wrap: Any) -> list[Any]:
        base = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        module = wrap(base).train()
        hidden = torch.randn(2, 8, 32, dtype=torch.bfloat16, requires_grad=True)
        with Issued() as noted:
            module(hidden).float().sum().backward()
        return noted.found

    def theirs(base: nn.Linear) -> nn.Module:
        module = Linear(base, "default", r=4, lora_alpha=8, config=LoraConfig(r=4, lora_alpha=8))
        return _wide_adapters(module)

    assert issued(lambda base: LoraLinear(base, 48, 32, 4, "cpu")) == issued(theirs)


def _wide_adapters(module: Any) -> Any:
    module.lora_A.float()
    module.lora_B.float()
    return module


def test_a_prepared_4_bit_model_has_the_bytes_of_its_formula() -> None:
    run = PeerRun("small", 1, 8, 4, ("q_proj",), dtype="float16", nf4=True, prepared=True)
    model = build_model(run, SIZES, "cpu")
    linears = [module for module in model.modules() if isinstance(module, Nf4Linear)]
    assert len(linears) == 2 * 7
    numbers = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128  # of a layer
    assert sum(linear.codes.numel() for linear in linears) == 2 * numbers // 2
    assert sum(linear.scales.nbytes for linear in linears) == 2 * numbers // 64 * 4
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.nbytes for parameter in trained) == 2 * 4 * (64 + 64) * 4
    frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    assert sum(parameter.nbytes for parameter in frozen.values()) == (96 * 64 + 5 * 64) * 4
    assert model.lm_head.weight is model.model.embed_tokens.weight


def replayed(streamed: str) -> tuple[PhaseReplay, int]:
    """(A later step of ten layers, whose codes take blocks without a rest; how many copies another stream made)."""
    run = PeerRun("small", 1, 64, 4, ("q_proj",), nf4=True, double_quant=True, streamed=streamed)
    trace = trace_run(run, {**SIZES, "num_hidden_layers": 10})
    copied = [one for one in trace.storages if one.stream and trace.phases[one.phase] == STEP]
    return replay(trace).phases[STEP], len(copied)


def test_of_streamed_codes_two_layers_are_on_the_device_and_freed_ones_are_held() -> None:
    (resident, none), (streamed, copies) = apart(replayed, ""), apart(replayed, "codes")
    codes = (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) // 2  # of a layer, bytes
    assert resident.allocated - streamed.allocated == 8 * codes
    assert resident.active == resident.allocated and streamed.active > streamed.allocated + 2 * codes
    # All but two layers in forward and in backward, as their receipt says: 62 and 62 of 64. Of seven linears each.
    assert none == 0 and copies == 7 * (8 + 8)
