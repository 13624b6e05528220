"""The check that packed documents are apart passes for our models, and fails as soon as anything
leaks.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.data import batches as leaks
from recipe_lib.data import check_packing_isolation
from recipe_lib.errors import SetupError
from recipe_lib.memory import compile_layers
from recipe_lib.models import build_meta, build_spec, init_weights, mixture, read_config
from recipe_lib.ops import attention, special_attention
from recipe_lib.parallel import shard_model, start_world
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import build_small_spec
from tests.recipes.mixtures import write_mixture

KINDS = {
    "plain": {},
    "window": {"windows": (5, None, 5)},
    "soft-capped": {"attention_softcap": 20.0, "logit_softcap": 10.0},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def model_of(dtype: torch.dtype = torch.float32, init_std: float = 0.2, **changes) -> nn.Module:
    spec = replace(build_small_spec(), init_std=init_std, **changes)
    model = build_meta(spec, dtype).to_empty(device="cpu")
    init_weights(model, 3, spec)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_our_models_keep_documents_apart(kind, dtype):
    model = model_of(dtype, **KINDS[kind]).train()
    check_packing_isolation(model, model.spec, "cpu")
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    leak, difference, has_experts, measured = leaks._measure_leaks(
        model, model.spec.vocab_size, torch.device("cpu"), None
    )
    assert leak == 0 and measured == dtype and not has_experts
    assert difference < {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]


def blind_mask(monkeypatch) -> None:
    """Only causality is left of the mask."""
    reach = attention.compute_reach
    for module in (attention, special_attention):
        monkeypatch.setattr(
            module, "compute_reach", lambda documents, **arguments: reach(None, **arguments)
        )


def lost_border(monkeypatch) -> None:
    """The first token of a document still counts as one of the document before."""
    make = attention.make_attention_info

    def shifted(lengths, pack_length):
        info = make(lengths, pack_length)
        return replace(
            info, documents=torch.cat([info.documents[:, :1], info.documents[:, :-1]], dim=1)
        )

    monkeypatch.setattr(leaks, "make_attention_info", shifted)


def no_causality(monkeypatch) -> None:
    """Documents are apart, but tokens see what comes after them: no leak between documents, yet not
    as alone.
    """
    visible = attention.make_visible_mask

    def both_ways(reach, keys):
        seen = visible(reach, keys)
        return seen | seen.transpose(-1, -2)

    monkeypatch.setattr(attention, "make_visible_mask", both_ways)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init_std", [0.2, 0.02])
@pytest.mark.parametrize(
    ("kind", "broken"), [("plain", blind_mask), ("soft-capped", blind_mask), ("plain", lost_border)]
)
def test_a_broken_mask_is_found(monkeypatch, kind, broken, dtype, init_std):
    broken(monkeypatch)
    model = model_of(dtype, init_std, **KINDS[kind])
    name = str(dtype).removeprefix("torch.")
    line = (
        rf"^data\.packing: on cpu in {name} \(attention masks\) a document's logits moved by"
        r" [\d.e-]+ of their size "
        r"when its neighbor in the sequence was changed, expected 0: packed documents see each"
        r" other; "
        r"set data\.packing to false"
    )
    with pytest.raises(SetupError, match=line) as raised:
        check_packing_isolation(model, model.spec, "cpu")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("broken", [None, blind_mask, lost_border])
def test_experts_may_round_otherwise_and_leak_nothing(monkeypatch, broken, tmp_path: Path):
    """More rows of an expert, another rounding of each: here by a sum that does so; a leak is found
    all the same.
    """
    spec = replace(
        build_spec(json.loads(write_mixture("gpt_oss", tmp_path).read_text()), "tiny"),
        init_std=0.02,
    )
    exact = mixture.sum_choices
    monkeypatch.setattr(
        mixture, "sum_choices", lambda rows, of: exact(rows, of) * (1 + 1e-7 * int(of.ends[0]))
    )
    model = build_meta(spec, torch.float32).to_empty(device="cpu")
    init_weights(model, 3, spec)
    if broken is None:
        assert leaks._measure_leaks(model, spec.vocab_size, torch.device("cpu"), None)[0] > 0
        check_packing_isolation(model, spec, "cpu")
        return
    broken(monkeypatch)
    with pytest.raises(SetupError, match="of their size when .* expected at most 0.00012: packed"):
        check_packing_isolation(model, spec, "cpu")


def test_what_is_not_as_alone_is_found(monkeypatch):
    model = model_of()
    no_causality(monkeypatch)
    line = (
        r"the logits of packed documents differ by [\d.]+% from those of each document alone,"
        r" expected at most 1%;"
    )
    with pytest.raises(SetupError, match=line):
        check_packing_isolation(model, model.spec, "cpu")


class Learned(nn.Module):
    """Positions that are learned, not turned: they show where a document begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(200, 8)

    def forward(self, tokens, positions=None, info=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        return self.tokens(tokens) + self.places(positions)


def test_positions_that_do_not_restart_are_found(monkeypatch):
    check_packing_isolation(Learned(), SimpleNamespace(vocab_size=50), "cpu")
    monkeypatch.setattr(
        leaks, "compute_document_positions", lambda lengths, width: torch.arange(width).repeat(2, 1)
    )
    with pytest.raises(SetupError, match="from those of each document alone"):
        check_packing_isolation(Learned(), SimpleNamespace(vocab_size=50), "cpu")


def test_dropout_does_not_disturb_it():
    model = model_of()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Dropout(0.5))
    model.train()
    check_packing_isolation(model, model.spec, "cpu")
    assert model.model.layers[1].mlp[1].training


@pytest.mark.slow
def test_compiled_layers_are_compiled_for_training_afterwards(monkeypatch):
    shapes = []

    def backend(graph, inputs):
        shapes.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph

    model = model_of()
    compile_layers(model, backend)
    check_packing_isolation(model, model.spec, "cpu")
    assert shapes, "the check is to run what is compiled"
    shapes.clear()
    tokens = torch.zeros(3, 10, dtype=torch.int64)
    model(tokens, labels=tokens).backward()
    assert shapes == [[]], "compiled once, for that length"
    torch.compiler.reset()


@pytest.mark.parametrize("broken", [False, True])
def test_two_ranks_agree_on_a_sharded_model(broken):
    def rank() -> str:
        logging.disable()
        if broken:
            blind_mask(pytest.MonkeyPatch())
        with start_world(FullFinetuneConfig(device="cpu")) as world:
            model = build_meta(build_small_spec(), torch.float32)
            shard_model(model, ParallelConfig(), MemoryConfig(), world)
            model.to_empty(device="cpu")
            init_weights(model, 3, build_small_spec())
            try:
                check_packing_isolation(model, model.spec, world.device)
            except SetupError as error:
                return str(error)
            return "apart"

    found = run_ranks(rank, 2)
    assert found[0] == found[1] and (
        "see each other" in found[0] if broken else found[0] == "apart"
    )


def test_a_trained_model_in_two_dtypes(realdata):
    folder = realdata / "stories260K-hf"
    spec = build_spec(read_config(folder), str(folder))
    for dtype in (torch.float32, torch.bfloat16):
        model = build_meta(spec, dtype).to_empty(device="cpu")
        load_weights(model, spec, folder)
        check_packing_isolation(model, spec, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(monkeypatch, kind, dtype):
    model = model_of(dtype, **KINDS[kind]).cuda()
    check_packing_isolation(model, model.spec, "cuda")
    make = leaks.make_attention_info
    monkeypatch.setattr(
        leaks, "make_attention_info", lambda lengths, width: make([[width]] * len(lengths), width)
    )
    with pytest.raises(SetupError, match="on cuda in .* see each other"):
        check_packing_isolation(model, model.spec, "cuda")
