"""What a compiled layer keeps for backward, where it exchanges by an inferred plan: no gathered
tokens.

torch's partitioner takes the second gather of the same tokens, which backward makes, for the first
one, and keeps what that gave: as many tokens as all ranks have, where each could keep its own.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_ATEN = torch.ops.aten
# What makes gathered tokens of what a gather gives: wait, views and copies.
_COPIES = frozenset({torch.ops._c10d_functional.wait_tensor.default, _ATEN.view.default, _ATEN._unsafe_view.default,
                     _ATEN.reshape.default, _ATEN.clone.default, _ATEN.alias.default, _ATEN.permute.default,
                     _ATEN.transpose.int, _ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim,
                     operator.getitem})  # fmt: skip


def _gathered(graph: fx.Graph) -> list[fx.Node]:
    """What forward gathers, with its views and copies."""
    found: dict[fx.Node, None] = {}
    of_backward: set[fx.Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if (node.op == "placeholder" and "tangents" in node.name) or of_backward.intersection(read):
            of_backward.add(node)
        elif node.target is _GATHER or (
            node.target in _COPIES and any(each in found for each in read)
        ):
            found[node] = None
    return list(found)


class GathersAgain(CustomPartitionerFn):
    """torch's partitioner, as inductor's setting `custom_partitioner_fn` takes one; what is
    gathered is not kept.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of a layer's joint graph."""
        again = _gathered(gm.graph)
        for node in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
        with config.patch(ban_recompute_materialized_backward=not again):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """What inductor's cache of graphs knows it by."""
        return get_hash_for_files((__file__,))
