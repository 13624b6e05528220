"""Tokens that ranks share out by inferred plans: what may not be, mistakes that proofs find, and
what is kept.
"""

import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.inferred_tp_memory import measure_kept
from benchmarks.tp_memory import OURS, build_spec_of_layers, compute_kept_bytes
from recipe_lib.external.certificate import certify
from recipe_lib.external.tensor_plan import infer
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import replace_argument
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.external.tensor_plan.token_sharing import share_tokens
from recipe_lib.external.tensor_plan.transformers_models import (
    build_example_inputs,
    build_transformers_model,
    infer_config_plan,
)
from recipe_lib.ops.kept_tensors import KeptTensors, minimum_cut
from tests.plan.apart import call_in_fork

WIDTH = 16
ROWS = 2
LENGTH = 8
WORDS = 32


class Mixing(nn.Module):
    """A norm, something over the tokens of a row, and an MLP, each beside a residual stream."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second, self.last = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        stream = self.words(input_ids)
        stream = stream + self.down(F.gelu(self.up(self.first(stream))))
        held = self.second(stream)
        if self.way == "convolution":
            held = self.mix(held.transpose(1, 2)).transpose(1, 2)
        elif self.way == "sums":
            held = held.cumsum(1)
        elif self.way == "places":
            held = held * torch.arange(held.shape[1], device=held.device, dtype=held.dtype)[:, None]
        elif self.way == "neighbors":
            held = F.pad(held, (0, 0, 1, 0))[:, :-1]
        stream = stream + held
        return self.head(self.last(stream + self.narrow(F.gelu(self.wide(stream)))))


def ids(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator).to(device)}


def faults(model, plan, size=2):
    return certify(model, plan, size, ids()).failures


@pytest.mark.parametrize("way", ["nothing", "convolution", "sums", "places", "neighbors"])
def test_what_looks_at_several_tokens_gets_whole_rows(way):
    model = Mixing(way)
    randomize(model)
    plan = infer_plan(model, ids())
    assert plan.shared_tokens > 0.3 and 2 in plan.legal_sizes
    assert plan.parameter("second.weight").gradient == "partial"
    gathered = [
        each
        for each in plan.boundaries
        if each.kind == "gather" and each.module in ("second", "mix", "")
    ]
    assert bool(gathered) == (way != "nothing") or way == "places"
    for size in (2, 4):
        assert not faults(model, plan, size)


def test_a_convolution_that_is_taken_for_position_wise_is_caught(monkeypatch):
    def careless(step):
        ours = step.get_dims(step.get_arg("input"))
        kernel = step.get_dims(step.get_arg("weight"))
        return [[ours[0], step.join(ours[1], kernel[0]), ours[2]]]

    def share_by_careless_rules(trace, **asked):
        for record in trace.records:
            if "convolution" in record.name:
                record.rule = careless
        return share_tokens(trace, **asked)

    model = Mixing("convolution")
    randomize(model)
    monkeypatch.setattr(infer, "share_tokens", share_by_careless_rules)
    plan = infer_plan(model, ids())
    assert not any(each.module == "mix" for each in plan.boundaries)
    assert any("what the model gives is off by" in each for each in faults(model, plan))


def test_a_norm_of_tokens_whose_gradient_is_taken_for_the_whole_one_is_caught():
    config = shrink(pytest.importorskip("transformers").AutoConfig.for_model("llama"))
    plan = infer_config_plan(config)
    norms = {each.name for each in plan.parameters if each.gradient == "partial"}
    assert len(norms) == 2 * config.num_hidden_layers + 1
    wrong = dataclasses.replace(
        plan,
        parameters=tuple(
            dataclasses.replace(each, gradient="full") if each.name in norms else each
            for each in plan.parameters
        ),
    )
    model = build_transformers_model(config, "cpu")
    randomize(model)
    inputs = build_example_inputs(config, device="cpu")
    failures = certify(model, wrong, 2, inputs).failures
    assert len(failures) == len(norms) and all(
        "the gradient of" in each for each in failures
    )  # the loss says nothing


def changed(plan, kind, number, **fields):
    """The plan with one of its boundaries changed, or left out."""
    place = [at for at, each in enumerate(plan.boundaries) if each.kind == kind][number]
    held = list(plan.boundaries)
    held[place : place + 1] = [dataclasses.replace(held[place], **fields)] if fields else []
    return dataclasses.replace(plan, boundaries=tuple(held))


@pytest.mark.parametrize("mistake", ["another dimension", "no slice", "no gather"])
def test_a_slice_that_is_wrong_or_missing_is_caught(mistake):
    model = Mixing("sums")
    randomize(model)
    plan = infer_plan(model, ids())
    assert not faults(model, plan)
    if mistake == "another dimension":
        wrong = [changed(plan, "slice", at, dim=2) for at in range(count(plan, "slice"))]
    else:
        kind = mistake.removeprefix("no ")
        wrong = [changed(plan, kind, at) for at in range(count(plan, kind))]
    assert wrong and all(faults(model, each) for each in wrong)


def count(plan, kind):
    return sum(each.kind == kind for each in plan.boundaries)


def test_rows_that_ranks_do_not_divide_are_told_where_gradients_are_wanted():
    model = Mixing("nothing")
    randomize(model)
    plan = infer_plan(model, ids())
    odd = {"input_ids": ids()["input_ids"][:, :7]}
    said = "found token ids of [2, 7], expected [b, s] with an s that 2 ranks can share evenly"
    assert said in certify(model, plan, 2, odd).failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4])
def test_a_llama_layer_keeps_what_the_native_plan_keeps(size):
    pytest.importorskip("transformers")
    native = compute_kept_bytes(build_spec_of_layers("llama3/8B"), size, OURS)
    # In processes of their own: a simulated device gives autograd threads, which no fork of this
    # process would have.
    assert 0.99 < call_in_fork(measure_kept, "llama3/8B", size, "transformers") / native < 1.01
    assert call_in_fork(measure_kept, "llama3/8B", size, "transformers", "false") > 2 * native


def test_the_fewest_bytes_are_kept_and_of_equal_ones_those_that_cost_least():
    # a norm: stream 2 -> wide 4 -> scale 1; wide and scale -> normed 4 -> narrow 2
    sizes, roots = (2, 4, 1, 4, 2), (True, False, False, False, False)
    parents = ((), (0,), (1,), (1, 2), (3,))
    assert minimum_cut(sizes, roots, parents, frozenset({1, 2, 4})) == {0}
    # queries as they come and turned, of the same size: those that are asked for
    assert minimum_cut((8, 8), (True, False), ((), (0,)), frozenset({1})) == {1}
    # gate and up, both asked for, and what is made of them
    assert minimum_cut(
        (3, 3, 3, 3), (True, True, False, False), ((), (), (0,), (2, 1)), frozenset({0, 1, 2, 3})
    ) == {
        0,
        1,
    }


def layer_of(stream, weights, noted):
    """A norm and a gated MLP, as an executor sees its calls."""

    def call(function, *args, **kwargs):
        result = function(*args, **kwargs)
        if noted is not None:
            noted.note(function, args, kwargs, result)
        return result

    wide = call(torch.Tensor.float, stream)
    scale = call(
        torch.rsqrt,
        call(torch.add, call(torch.mean, call(torch.pow, wide, 2), -1, keepdim=True), 1e-6),
    )
    normed = call(
        torch.mul, call(torch.Tensor.to, call(torch.mul, wide, scale), stream.dtype), weights[0]
    )
    gate, up = F.linear(normed, weights[1]), F.linear(normed, weights[2])
    return F.linear(call(torch.mul, call(F.silu, gate), up), weights[3])


@pytest.mark.parametrize("written", [False, True])
def test_what_is_made_again_is_the_same_bit_for_bit_and_nothing_is_where_something_was_written_into(
    written,
):
    generator = torch.Generator().manual_seed(0)
    shapes = [(16,), (24, 16), (24, 16), (16, 24)]
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in [(5, 16), *shapes]]
    found, held = [], []
    for noted in (None, KeptTensors()):
        stream, *weights = (each.clone().requires_grad_() for each in values)
        begin = stream * 1
        if noted is None:
            out = layer_of(begin, weights, None)
        else:
            noted_kept = []
            with noted.layer():
                out = layer_of(begin, weights, noted)
                noted_kept += noted._saved_tensors
                if written:
                    with torch.no_grad():
                        next(iter(noted._nodes.values())).tensor.add_(0)
            held = [each for each in noted_kept if each.view is None]
            assert len(held) == len(noted_kept) if written else len(held) < len(noted_kept) / 2
        out.float().square().sum().backward()
        found.append([each.grad for each in (stream, *weights)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_argument_that_is_replaced_is_let_go_at_once():
    """And not when Python's collector runs, steps later."""
    gc.disable()
    try:
        args, kwargs = replace_argument(([torch.zeros(3)], 2), {}, "0.0", torch.ones(3))
        given = weakref.ref(args[0][0])
        del args, kwargs
        assert given() is None
    finally:
        gc.enable()
