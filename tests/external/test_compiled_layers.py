"""Compiled layers of external models by inferred plans: gradients, collectives, and what is kept
for backward.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from recipe_lib.config.registry import list_names as names_of
from recipe_lib.config.registry import register
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import SetupError
from recipe_lib.external import module_spec
from recipe_lib.external.compiled_layers import RegatheringPartitioner
from recipe_lib.external.module_spec import read_spec
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.memory.apply_levers import compile_layers
from recipe_lib.models import build_meta
from recipe_lib.ops import gathered
from recipe_lib.parallel import materialize, shard_model, start_world
from recipe_lib.parallel.tensor import shard_tensors
from tests.distributed.ranks import import_compiler, run_ranks
from tests.external import test_tensor_parallel as eager

pytest.importorskip("transformers")
FUNCTIONAL = "_c10d_functional"
LAYERS = {
    "llama, three layers": eager.CONFIGS["llama"] | {"num_hidden_layers": 3},
    "mixtral": eager.CONFIGS["mixtral"] | {"num_hidden_layers": 1},
}
# Forward and backward of each layer that is traced: of a Llama all but the first get a rank's
# tokens, and are alike.
GRAPHS = {"llama, three layers": 4, "numbered": 4}
WIDTH = eager.SMALL["hidden_size"]


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and remembers them and what forward
    keeps.
    """

    def __init__(self) -> None:
        self.code: list[str] = []
        self.count: Counter[str] = Counter()  # of what ranks did together
        self.kept: list[list[int]] = []  # shapes; of parameters, whole or transposed, none
        self.divide = RegatheringPartitioner()
        self.backend = aot_autograd(
            fw_compiler=self.note, bw_compiler=self.note, partition_fn=self.note_kept
        )

    def note(self, graph: Any, inputs: Any) -> Any:
        self.code.append(graph.code)
        targets = [
            node.target
            for node in graph.graph.nodes
            if getattr(node.target, "namespace", "") == FUNCTIONAL
        ]
        names = Counter(target.__name__.partition(".")[0] for target in targets)
        del names["wait_tensor"]

        def run(*values: Any) -> Any:
            self.count.update(names)
            return graph.forward(*values)

        return make_boxed_func(run)

    def note_kept(self, joint: Any, inputs: Any, **settings: Any) -> Any:
        forward, backward = self.divide(joint, inputs, **settings)
        given = {node.name for node in forward.graph.nodes if node.op == "placeholder"}
        held = forward.graph.output_node().args[0][settings["num_fwd_outputs"] :]
        made = [
            each
            for each in held
            if each.name not in given and each.target is not torch.ops.aten.t.default
        ]
        self.kept += [list(each.meta["val"].shape) for each in made if "val" in each.meta]
        return forward, backward


class Counted:
    """In the place of the operators of ranks: counts those that run, and none that is traced."""

    def __init__(self, count: Counter[str]) -> None:
        self.count = count

    def __getattr__(self, name: str) -> Any:
        def call(tensor: Any, *settings: Any) -> Any:
            self.count[name] += type(tensor) is torch.Tensor and name != "wait_tensor"
            return getattr(torch.ops._c10d_functional, name)(tensor, *settings)

        return call


class NumberedLayer(eager.OwnLayer):
    """Does something else in each place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number

    def forward(self, stream: Tensor) -> Tensor:
        return super().forward(stream) / (1 + self.layer_idx)


class Numbered(eager.Own):
    """A model whose layers read their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(NumberedLayer(number) for number in range(2))


def build_with(
    backend: Any, kind: str, parallel: dict[str, Any], memory: MemoryConfig, world: Any
) -> Any:
    """As `eager.build`; layers are compiled by the backend, if there is one."""
    if kind == "numbered" and kind not in names_of("model"):
        register("model", kind)(lambda config: Numbered())
    spec = read_spec(eager.config_of(kind), kind, kind if kind == "numbered" else "transformers")
    model: Any = build_meta(spec, eager.DTYPES.get(kind, torch.float64))
    settings, divided = ParallelConfig(**parallel), eager.Parallel()
    if world is not None:
        divided = eager.Parallel(tensor_gradients=shard_tensors(model, settings, memory, world))
        apply_activation_checkpointing(model, memory.activation_checkpointing)
        if backend is not None:
            compile_layers(model, backend)
        shard_model(model, settings, memory, world)
    materialize(model, memory, torch.device("cpu"))
    return model, divided


def differences(
    kind: str, parallel: dict[str, Any], mode: str, world: Any
) -> tuple[list[str], Graphs]:
    """Between ranks and one process, and between the collectives of compiled layers and of
    others.
    """
    memory, packed = (
        MemoryConfig(activation_checkpointing=mode.removeprefix("packed ")),
        mode.startswith("packed"),
    )
    graphs, counts = Graphs(), []
    for backend in (None, graphs.backend):
        eager.build = partial(build_with, backend)
        counts.append(Counter())
        gathered._FUNCTIONAL = Counted(counts[-1])
        faults = eager.differences(kind, parallel, memory, world, packed)
    gathered._FUNCTIONAL = torch.ops._c10d_functional
    torch._dynamo.reset()
    # Compiled code gathers a gradient once that two operators need, and computes no more again than
    # it has to.
    without, compiled = counts[0], counts[1] + graphs.count
    more = {
        name: (compiled[name], without[name]) for name in compiled if compiled[name] > without[name]
    }
    fewer = {
        name: (compiled[name], without[name]) for name in without if compiled[name] < without[name]
    }
    if more or (mode == "none" and set(fewer) - {"all_gather_into_tensor"}):
        faults.append(f"collectives {more} {fewer}")
    if not graphs.code or not without or len(graphs.code) != GRAPHS.get(kind, len(graphs.code)):
        faults.append(f"{len(graphs.code)} graphs are compiled")
    wide = [prod(shape) for shape in graphs.kept if shape[-1] == WIDTH]
    # Torch's partitioner alone would keep what is gathered, of more than a rank's tokens.
    if kind.startswith("llama") and (not wide or max(wide) >= eager.ROWS * eager.LENGTH * WIDTH):
        faults.append(f"{wide} numbers are kept")
    return faults, graphs


def compare(cases: list[tuple[str, dict[str, Any], str]]) -> tuple[list[str], list[str]]:
    """What differs, and the code of all graphs."""
    eager.CONFIGS.update(LAYERS)
    faults, code = [], []
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**cases[0][1]))
    with start_world(cfg) as world:
        for kind, parallel, mode in cases:
            found, graphs = differences(kind, parallel, mode, world)
            faults += [f"{kind} {parallel} {mode}: {each}" for each in found]
            code += graphs.code
    return faults, code


def check(ranks: int, cases: list[tuple[str, dict[str, Any], str]]) -> None:
    import_compiler()
    eager.import_classes(["llama", "mixtral"])
    outcomes = run_ranks(compare, ranks, cases, timeout=400)
    for faults, _ in outcomes:
        assert not faults, "\n".join(faults)
    codes = [code for _, code in outcomes]
    for rank, code in enumerate(
        codes
    ):  # or else inductor could order collectives in other ways on each rank
        assert code == codes[rank - rank % cases[0][1]["tensor"]], f"rank {rank}"


@pytest.mark.slow
def test_gradients_are_those_of_one_process() -> None:
    cases = [("llama, three layers", "none"), ("mixtral", "packed full"), ("numbered", "selective")]
    check(2, [(kind, {"tensor": 2}, mode) for kind, mode in cases])


def run_llama(backend: Any, world: Any) -> None:
    model, _ = build_with(backend, "llama", {"tensor": 2}, MemoryConfig(), world)
    eager.fill(model)
    tokens = (
        torch.arange(eager.ROWS * eager.LENGTH).view(eager.ROWS, eager.LENGTH) % eager.VOCABULARY
    )
    eager.backward(model, tokens, tokens, torch.tensor(1), False)
    torch._dynamo.reset()


def refusals() -> list[str]:
    """What is said of compiled layers of a Llama without a kernel, and with two plans."""
    with start_world(FullFinetuneConfig(device="cpu", parallel=ParallelConfig(tensor=2))) as world:
        said = []
        proven = module_spec.infer_proven_plan
        for backend, plan in ((without_kernel, proven), ("aot_eager", another_plan)):
            module_spec.infer_proven_plan = plan
            with pytest.raises(SetupError) as raised:
                run_llama(backend, world)
            said.append(str(raised.value))
    return said


def without_kernel(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("there is no kernel")


def another_plan(*asked: Any, proven: Any = module_spec.infer_proven_plan) -> ShardingPlan:
    plan = proven(*asked)
    changed = [
        replace(each, function="another") if "layers.1." in each.module else each
        for each in plan.boundaries
    ]
    return replace(plan, boundaries=tuple(changed))


@pytest.mark.slow
def test_what_cannot_be_traced_is_an_error() -> None:
    import_compiler()
    eager.import_classes(["llama"])
    said = run_ranks(refusals, 2)[0]
    assert (
        "compile: model.layers.0 cannot be traced" in said[0]
        and "NotImplementedError: there is no kernel" in said[0]
    )
    assert (
        "model.layers.1." in said[1]
        and "expected another); set compile=false or parallel.tensor=1" in said[1]
    )
