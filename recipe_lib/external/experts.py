"""Quantize and adapt the experts of transformers' classes, whose matrices are parameters.

Such a class has the matrices of all experts of a layer in two parameters of 3 dimensions.
`replace_experts` puts the modules of our own mixtures (`models.mixture`) in their place, under
their names, and a forward that multiplies by them. How a class uses its parameters is read off
transformers' marks and their shapes, and proven on small copies of its modules.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.adapters.layers import AdapterSettings, adapt
from recipe_lib.models.language_model import list_layer_names, mix_in
from recipe_lib.models.mixture import ExpertLinear, compute_scored_bias, gather_row_biases
from recipe_lib.models.spec import ExpertsLayout
from recipe_lib.ops.kept_tensors import has_others_function, run_cheap
from recipe_lib.ops.mlp import Groups, group_tokens, order_by_expert, sum_choices

_TOKENS = 24  # of the forwards that are compared


class GroupedExperts(nn.Module):
    """A mixin that gives a class' experts a forward with the modules of our own mixtures.

    These stand under the names of the parameters whose place they take.
    """

    layout: ExpertsLayout

    def forward(
        self, hidden: Tensor, chosen: Tensor | None = None, scores: Tensor | None = None
    ) -> Tensor:
        """Return what the class' own forward returns. chosen, scores: None: `layout.takes_rows`."""
        inner_linear = getattr(self, self.layout.inner)
        outer_linear = getattr(self, self.layout.outer)
        if chosen is None or scores is None:
            groups = _share_rows(hidden, inner_linear.num_experts)
            inner = _run_as_one(_multiply, hidden, inner_linear, groups)
            product = run_cheap(self._multiply_inner, inner, None)
            return _run_as_one(_multiply, product, outer_linear, groups)
        groups = group_tokens(chosen, inner_linear.num_experts)
        inner = _run_as_one(_multiply, hidden, inner_linear, groups, of_tokens=True)
        inner_bias = getattr(self, f"{self.layout.inner}_bias", None)
        if inner_bias is not None:
            inner = _run_as_one(_add_biases, inner, inner_bias, groups)
        row_scores = _run_as_one(order_by_expert, scores, groups)
        norm = getattr(self, "post_expert_norm", None)
        # Before the second product, as in our own mixtures, unless a norm would undo it.
        product = run_cheap(self._multiply_inner, inner, row_scores if norm is None else None)
        del inner  # [m, 2f]: freed before the second product, where backward does not need it
        # Summed before ranks add up their parts of it, unless a norm is in between.
        result = _run_as_one(_multiply, product, outer_linear, groups, is_summed=norm is None)
        if norm is not None:
            rows = (norm(result) * row_scores.unsqueeze(1)).to(hidden.dtype)
            result = _run_as_one(sum_choices, rows, groups)
        outer_bias = getattr(self, f"{self.layout.outer}_bias", None)
        if outer_bias is None:
            return result
        return result + compute_scored_bias(outer_bias, scores, chosen)

    def _multiply_inner(self, inner: Tensor, scores: Tensor | None) -> Tensor:
        """Return the activated channels `[m, f]` of inner ones `[m, f]` or, gated, `[m, 2f]`."""
        module: Any = self
        if not self.layout.gated:
            product = module.act_fn(inner)
        elif hasattr(self, "_apply_gate"):
            product = module._apply_gate(inner)
        else:
            gate, up = inner.chunk(2, dim=-1)
            product = module.act_fn(gate) * up
        return product if scores is None else (product * scores.unsqueeze(1)).to(inner.dtype)


def _run_as_one(
    function: Callable[..., Tensor], hidden: Tensor, *args: Any, **settings: bool
) -> Tensor:
    """Return `function(hidden, *args, **settings)`, as one call for a mode that numbers calls.

    So a tensor-parallel plan, which is made of experts in 16 bits, is one for all their kinds.
    args: parameters and modules first, whose parameters the mode is shown.
    """
    if torch.compiler.is_dynamo_compiling() or not has_others_function(hidden):
        return function(hidden, *args, **settings)
    module = args[0]
    shown = module.parameters() if isinstance(module, nn.Module) else ()
    result: Tensor = handle_torch_function(function, (hidden,), hidden, *args, *shown, **settings)
    return result


def _multiply(
    hidden: Tensor,
    linear: nn.Module,
    groups: Groups,
    *_: Any,
    of_tokens: bool = False,
    is_summed: bool = False,
) -> Tensor:
    """Return the products `[m, o]` of rows `[m, i]`, or with `of_tokens` of tokens `[n, i]`.

    is_summed: return their sums over each token's choices, `[n, o]`. _: the linear's parameters.
    """
    rows: Tensor = linear(hidden, groups, of_tokens=of_tokens)
    return sum_choices(rows, groups) if is_summed else rows


def _add_biases(inner: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    return inner + gather_row_biases(bias, groups)


def _share_rows(rows: Tensor, num_experts: int) -> Groups:
    """Return the groups of rows that are sorted already, as many of each expert."""
    order = torch.arange(rows.shape[0], device=rows.device)
    each = rows.shape[0] // num_experts
    return Groups(
        experts=order // each,
        tokens=order,
        places=order,
        ends=torch.arange(1, num_experts + 1, dtype=torch.int32, device=rows.device) * each,
        choices=1,
    )


def find_experts(model: nn.Module) -> dict[str, ExpertsLayout]:
    """Return name -> layout of the modules inside a model's layers that are experts.

    These are modules with two parameters of 3 dimensions, of classes that are proven to use them
    as `GroupedExperts` does.
    """
    prefixes = tuple(f"{name}." for name in list_layer_names(model))
    proven: dict[tuple[type[nn.Module], ExpertsLayout], bool] = {}
    experts: dict[str, ExpertsLayout] = {}
    for name, module in model.named_modules():
        layout = _read_layout(module) if name.startswith(prefixes) else None
        if layout is None:
            continue
        kind = (type(module), layout)
        if kind not in proven:
            proven[kind] = _computes_alike(module, layout)
        if proven[kind]:
            experts[name] = layout
    return experts


def _read_layout(module: nn.Module) -> ExpertsLayout | None:
    """Return how a module of experts keeps its matrices; None: it has not two of them."""
    matrices = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() == 3
    }
    if len(matrices) != 2:
        return None
    (inner, inner_matrix), (outer, outer_matrix) = matrices.items()
    # transformers marks modules of most classes by `is_transposed`; of the others shapes tell.
    mark = vars(module).get("is_transposed")
    is_transposed = inner_matrix.shape[2] != outer_matrix.shape[1] if mark is None else mark
    arguments = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return ExpertsLayout(
        inner=inner,
        outer=outer,
        transposed=is_transposed,
        gated=inner_matrix.numel() != outer_matrix.numel(),
        takes_rows=len(arguments) == 2,
        is_unmarked=is_transposed and mark is None,
    )


def _computes_alike(module: nn.Module, layout: ExpertsLayout) -> bool:
    """Return True if a small copy of a module computes what it does as `GroupedExperts`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") / 2

    # The planner simulates a run under dispatch modes, which must not see these forwards.
    with _disable_current_modes(), torch.no_grad():
        try:
            small, (experts, width) = _make_small(module, layout)
            for parameter in small.parameters():
                parameter.copy_(draw(*parameter.shape))
            inputs = [draw(_TOKENS, width)]
            if not layout.takes_rows:
                chosen = draw(_TOKENS, experts).argsort(dim=1)[:, :2]
                inputs += [chosen, draw(*chosen.shape)]
            expected = inspect.unwrap(type(module).forward)(small, *inputs)
            replace_matrices(small, layout, _make_linears(small, layout))
            return torch.allclose(small(*inputs), expected.view_as(inputs[0]))
        # A class of another layout raises anything, as what it computes with does not fit.
        except Exception:  # noqa: BLE001
            return False


def _make_small(module: nn.Module, layout: ExpertsLayout) -> tuple[Any, tuple[int, int]]:
    """Return a copy of a module on the host, in fp64 and of small sizes, and two of these.

    They are the numbers of experts, and of the channels that come in.
    """
    experts, *inner_shape = getattr(module, layout.inner).shape
    _, *outer_shape = getattr(module, layout.outer).shape
    if layout.transposed:
        inner_shape.reverse()
        outer_shape.reverse()
    width = inner_shape[1]
    channels = outer_shape[1]
    factor = inner_shape[0] // channels  # 2: with gates
    small_channels = 8
    small_width = 16 if width != channels else small_channels
    # What a size of the module's parameters and attributes is in the copy.
    sizes = {
        inner_shape[0]: factor * small_channels,
        channels: small_channels,
        width: small_width,
    }
    small_experts = sizes.setdefault(experts, min(experts, 4))
    small = copy.deepcopy(module)
    for part in small.modules():
        for name, value in list(vars(part).items()):
            if type(value) is int:
                setattr(part, name, sizes.get(value, value))
        for name, parameter in part._parameters.items():
            if parameter is not None:
                shape = [sizes[size] for size in parameter.shape]
                part._parameters[name] = nn.Parameter(torch.empty(shape, dtype=torch.float64))
    return small, (small_experts, small_width)


def _make_linears(module: nn.Module, layout: ExpertsLayout) -> dict[str, ExpertLinear]:
    """Return name -> `ExpertLinear`, with the class' own parameter, of the two of a module."""
    linears = {}
    for name in (layout.inner, layout.outer):
        parameter = module.get_parameter(name)
        experts, *sizes = parameter.shape
        outputs, inputs = reversed(sizes) if layout.transposed else sizes
        with torch.device("meta"):
            linear = ExpertLinear(experts, inputs, outputs, bias=False)
        linear.weight = parameter
        linear.transposed = layout.transposed
        linears[name] = linear
    return linears


def replace_matrices(
    module: nn.Module, layout: ExpertsLayout, linears: Mapping[str, nn.Module]
) -> None:
    """Put modules in the place of a module's parameters, in place. linears: by their names."""
    for name, linear in linears.items():
        del module._parameters[name]
        module._modules[name] = linear
    mix_in(GroupedExperts, module)
    module.layout = layout  # type: ignore[assignment]  # a dataclass, which is no module


def replace_experts(
    model: Any, adapter: AdapterSettings | None, quantize: str, always: bool = False
) -> None:
    """Quantize the experts of a meta model, and put adapters on them, in place.

    adapter: None: no adapters. quantize: `none`, `nf4` or `int8`. Experts of which nothing changes
    keep their class' forward, unless `always`.
    """
    other_parts = tuple(f"{part}." for part in model.other_parts)
    for name, layout in model.spec.layout().experts.items():
        if name.startswith(other_parts):
            continue
        module = model.get_submodule(name)
        linears = _make_linears(module, layout)
        changed = {child: adapt(linear, adapter, quantize) for child, linear in linears.items()}
        if changed == linears and not always:
            continue
        replace_matrices(module, layout, changed)
        names = {f"{name}.{child}.weight": f"{name}.{child}" for child in changed}
        model.tensor_names = {**model.tensor_names, **names}
    model.built_tensors = (model.built_tensors or frozenset()) | model.tensor_names.keys()
