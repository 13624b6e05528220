"""What a layer keeps for backward, in real runs and in plans, against formulas, to the byte.

docs/memory.md has the formulas in words; `kept_formula` computes them from a model's spec.
"""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers

from recipe_lib.adapters import add_adapters
from recipe_lib.config import load_config
from recipe_lib.config.schema import LoraConfig
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.models import Decoder, build_meta, build_spec, read_preset_config
from recipe_lib.models.mixture import BalanceLoss, Mixture
from recipe_lib.models.spec import DecoderSpec
from recipe_lib.plan.summary.rank_memory import build_layer_rows
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from tests.memory.kept_formula import (
    Adapters,
    Widths,
    count_attention_bytes,
    count_kept_bytes,
    count_remade_router_bytes,
    count_router_bytes,
)
from tests.memory.live_bytes import LiveBytes
from tests.models.reference import CASES, build_options
from tests.recipes.runs import FULL, LORA, PLAIN, ROOT, get_recipe_class, import_recipe_module
from tests.selection import mark_slow_except

ROWS = 2
LENGTH = 32
TOKENS = ROWS * LENGTH
RANK = 4
# Name -> (settings of `LoraConfig`, what the formula takes); None: all weights are trained.
KINDS: dict[str, tuple[dict[str, Any], Adapters] | None] = {
    "full": None,
    "lora": ({}, Adapters(RANK)),
    "dora": ({"dora": True}, Adapters(RANK, dora=True)),
    "dropout": ({"dropout": 0.1}, Adapters(RANK, dropout=True)),
    "dora-dropout": ({"dora": True, "dropout": 0.1}, Adapters(RANK, dora=True, dropout=True)),
    "nf4": ({"quantize_base": "nf4"}, Adapters(RANK)),
    "int8": ({"quantize_base": "int8"}, Adapters(RANK)),
    "experts": (
        {"target_modules": ["q", "k", "v", "o", "experts"]},
        Adapters(RANK, experts=True),
    ),
}
FAMILIES = [
    "llama3",
    "llama-biases",
    "mistral-window",
    "phi4-mini",
    "qwen2.5",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "smollm3",
    "granite",
    "granite4",
    "olmoe",
    "olmoe-normalized",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-unnormalized",
    "gpt-oss",
]
MIXTURES = FAMILIES[FAMILIES.index("olmoe") :]
# Blocks of NF4 are 64 elements of a row.
DIVISIBLE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}


def mark_slow_cases(cases: list[tuple[Any, ...]], fast: list[tuple[Any, ...]]) -> list[Any]:
    """Return cases of several arguments for `parametrize`, all marked slow but the fast ones."""
    assert set(fast) <= set(cases)
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def read_spec(case: str, layers: int, **changes: Any) -> DecoderSpec:
    """Return the spec of a case of `tests.models.reference` with so many layers."""
    options = build_options(case, **changes | {"num_hidden_layers": layers})
    config = getattr(transformers, CASES[case][0])(**options).to_dict()
    return cast(DecoderSpec, build_spec(config, case))


def build(
    spec: DecoderSpec, kind: str = "full", *, recomputes: bool = True, checkpointing: str = "none"
) -> Decoder:
    """Return a model in bf16 on the CPU with random weights, the same for all settings."""
    model = build_meta(spec, torch.bfloat16)
    settings = KINDS[kind]
    if settings is not None:
        add_adapters(model, LoraConfig(rank=RANK, **settings[0]), torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if (
            parameter.requires_grad or parameter.dtype == torch.bfloat16
        ):  # else codes of 4 or 8 bits
            parameter.data.normal_(std=0.2, generator=generator)
        else:
            parameter.data.zero_()
    memory = SimpleNamespace(recompute_cheap=recomputes, activation_checkpointing=checkpointing)
    recompute_cheap_tensors(model, cast(Any, SimpleNamespace(memory=memory, compile=False)))
    apply_activation_checkpointing(model, checkpointing)
    return model.train()


def run_forward(model: Decoder) -> torch.Tensor:
    """Return the loss of the same tokens in each call."""
    tokens = torch.randint(3, 97, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)  # of dropout
    return model(tokens, labels=tokens)


def measure_kept_bytes(case: str, kind: str, layers: int, *, recomputes: bool) -> int:
    """Return the bytes alive between forward and backward that forward has made."""
    changes = DIVISIBLE if kind in ("nf4", "int8") else {}
    model = build(read_spec(case, layers, **changes), kind, recomputes=recomputes)
    with torch.no_grad():
        run_forward(model)  # makes tables that later models share
    with LiveBytes() as live:
        loss = run_forward(model)
        kept = live.count_bytes()
    del loss
    return kept


CHECKED = [(family, kind) for family in FAMILIES for kind in ("full", "lora", "dora")]
CHECKED += [(family, kind) for family in FAMILIES for kind in ("dropout", "dora-dropout")]
CHECKED += [
    (family, kind) for family in ("llama3", "gemma2", "mixtral") for kind in ("nf4", "int8")
]
CHECKED += [(family, "experts") for family in MIXTURES]
FAST = [  # of CHECKED
    ("llama3", "full"),
    ("llama3", "lora"),
    ("qwen2.5", "dora"),
    ("gemma3", "full"),
    ("olmoe", "full"),
    ("gpt-oss", "full"),
]


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize(("family", "kind"), mark_slow_cases(CHECKED, FAST))
def test_a_layer_keeps_the_bytes_of_the_formula(family: str, kind: str, recomputes: bool) -> None:
    """The difference of a model of 4 and one of 3 layers is the last layer."""
    four, three = (
        measure_kept_bytes(family, kind, layers, recomputes=recomputes) for layers in (4, 3)
    )
    changes = DIVISIBLE if kind in ("nf4", "int8") else {}
    settings = KINDS[kind]
    assert four - three == count_kept_bytes(
        read_spec(family, 4, **changes),
        3,
        TOKENS,
        adapters=settings and settings[1],
        recomputes=recomputes,
    )


@pytest.mark.slow
def test_a_balance_loss_keeps_logits_once() -> None:
    """Of a router whose scores are not normalized too: the softmax of both is made again."""
    kept = []
    for layers in (4, 3):
        model = build(read_spec("olmoe", layers))
        for module in model.modules():
            if isinstance(module, Mixture):
                module.balance = BalanceLoss(0.01, layers, weight=0.01)
        with LiveBytes() as live:
            loss = run_forward(model)
            kept.append(live.count_bytes())
        loss.backward()
    plain = count_kept_bytes(read_spec("olmoe", 4), 3, TOKENS)
    assert kept[0] - kept[1] - plain < 4 * TOKENS  # some vectors of 6 experts


@pytest.mark.parametrize(
    ("family", "kind"),
    mark_slow_cases(
        [
            ("llama3", "dora"),
            ("qwen2.5", "dora"),
            ("qwen2.5", "dora-dropout"),
            ("gemma2", "dora"),
            ("olmoe", "full"),
            ("olmoe", "experts"),
            ("mixtral", "lora"),
            ("qwen3-moe", "full"),
            ("gpt-oss", "full"),
            ("gpt-oss", "dropout"),
        ],
        [("qwen2.5", "dora-dropout"), ("olmoe", "full"), ("gpt-oss", "full")],
    ),
)
def test_gradients_are_the_same_bits(family: str, kind: str) -> None:
    """With and without what is computed again."""
    gradients = []
    for recomputes in (True, False):
        model = build(read_spec(family, 2), kind, recomputes=recomputes)
        run_forward(model).backward()
        gradients.append(
            {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
        )
    first, second = gradients
    assert first and first.keys() == second.keys()
    for name, gradient in first.items():
        assert gradient is not None and torch.equal(gradient, second[name]), name


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", mark_slow_except(["llama3", "mixtral"], ["llama3"]))
def test_backward_leaves_nothing_to_the_collector(family: str, checkpointing: str) -> None:
    """A cycle of a graph and its saved tensors would live until Python's collector runs."""
    model = build(read_spec(family, 2), checkpointing=checkpointing)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            run_forward(model).backward()
            model.zero_grad(set_to_none=True)
            assert live.count_bytes() == 0
    finally:
        gc.enable()


# Plans


def plan_kept_bytes(
    preset: str, rank: int | None, folder: Path, *, recomputes: bool = True
) -> tuple[DecoderSpec, dict[str, int]]:
    """Return the spec of a model, and module -> kept bytes of its layer 1, of a plan's table.

    rank: of adapters on all linears; None: all weights are trained. A sequence has 128 tokens.
    """
    layers = 3
    config = read_preset_config(preset) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    recipe = FULL if rank is None else LORA
    overrides = [f"model.preset={file}", f"output_dir={folder / 'none'}", f"recipe={recipe}"]
    overrides += ["tokenizer.path=unread", "data.source=unread", "max_seq_len=128", "batch_size=1"]
    overrides += [f"memory.recompute_cheap={str(recomputes).lower()}"]
    overrides += [] if rank is None else [f"lora.rank={rank}"]
    module = import_recipe_module(recipe)
    simulated = simulate(
        get_recipe_class(module),
        load_config(PLAIN, overrides, module.Config),
        cast(Any, SimpleNamespace(tokens=128, documents=1)),
        phases=(),
        steps=(STEADY,),
    )
    prefix = "model.layers.1"
    kept = {
        row.module.removeprefix(prefix).lstrip("."): row.kept
        for row in build_layer_rows(simulated)
        if row.module == prefix or row.module.startswith(f"{prefix}.")
    }
    return cast(DecoderSpec, build_spec(config, preset)), kept


@pytest.mark.parametrize("recomputes", mark_slow_except([True, False], [True]))
@pytest.mark.parametrize(
    ("preset", "rank"),
    mark_slow_cases(
        [
            ("llama3/8B", None),
            ("llama3/8B", 16),
            ("phi4/14B", None),
            ("qwen2_5/7B", 16),
            ("qwen3/8B", None),
            ("gemma2/9B", 16),
            ("gemma3/12B", None),
            ("olmoe/7B", None),
            ("mixtral/8x7B", None),
            ("qwen3_moe/30B", None),
            ("gpt_oss/20B", None),
        ],
        [("llama3/8B", None)],
    ),
)
def test_a_plan_says_what_a_layer_keeps(
    preset: str, rank: int | None, recomputes: bool, tmp_path: Path
) -> None:
    spec, kept = plan_kept_bytes(preset, rank, tmp_path, recomputes=recomputes)
    adapters = None if rank is None else Adapters(rank)
    assert kept[""] == count_kept_bytes(
        spec, 1, 128, adapters=adapters, recomputes=recomputes, on_gpu=True
    )


@pytest.mark.slow
def test_a_plan_says_which_projection_keeps_it(tmp_path: Path) -> None:
    """Llama 3 8B with adapters of rank 16: 94,568 bytes a token, and a random state of 24."""
    _, kept = plan_kept_bytes("llama3/8B", 16, tmp_path)
    token_bytes = {module: size // 128 for module, size in kept.items()}
    narrow = 2 * 16
    assert token_bytes[""] == 94432 + 2 * 4 + 32 * 4
    assert token_bytes["self_attn.q_proj"] == 2 * 4096 + narrow
    assert token_bytes["self_attn.k_proj"] == 2 * 1024 + narrow
    assert token_bytes["self_attn.v_proj"] == 2 * 1024 + narrow
    assert token_bytes["self_attn.o_proj"] == 2 * 4096 + narrow
    assert token_bytes["mlp.gate_proj"] == 2 * 14336 + narrow
    assert token_bytes["mlp.up_proj"] == 2 * 14336 + narrow
    assert token_bytes["mlp.down_proj"] == narrow
    assert token_bytes["input_layernorm"] == token_bytes["post_attention_layernorm"] == 4


# docs/memory.md

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
# First column of the page's table -> cases of `tests.models.reference`.
PAGE_CASES = {
    "Llama, Mistral, Phi, SmolLM, Granite": [
        "llama3",
        "mistral-nemo",
        "phi4-mini",
        "smollm3",
        "granite",
        "granite4",
    ],
    "Qwen 2.5": ["qwen2.5"],
    "Qwen 3": ["qwen3"],
    "Gemma 1": ["gemma"],
    "Gemma 2": ["gemma2"],
    "Gemma 3": ["gemma3"],
    "OLMoE": ["olmoe-normalized"],
    "OLMoE with `clip_qkv`": ["olmoe"],
    "Mixtral": ["mixtral"],
    "Qwen 3 MoE": ["qwen3-moe"],
    "gpt-oss": ["gpt-oss"],
}


def read_rows(heading: str) -> list[list[str]]:
    """Return the cells of the page's table whose header row begins with `heading`."""
    _, _, table = PAGE.partition(f"\n| {heading}")
    assert table, heading
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def evaluate(formula: str, letters: dict[str, int]) -> int:
    """Return a sum of products such as `2 d + 2 h e`."""
    total = 0
    for term in formula.split(" + "):
        product = 1
        for factor in term.split():
            product *= int(factor) if factor.isdecimal() else letters[factor]
        total += product
    return total


@pytest.mark.parametrize("row", read_rows("family"), ids=lambda row: row[0])
def test_the_page_has_the_formulas(row: list[str]) -> None:
    family, *formulas = row
    for case in PAGE_CASES[family]:
        spec = read_spec(case, 4)
        widths = Widths.read(spec, 3)
        choices = widths.top_k or 1
        letters = {
            "d": spec.width,
            "h": spec.num_heads,
            "k": spec.num_kv_heads,
            "e": spec.head_width,
            "c": choices,
            "f": widths.f // choices,
        }
        for recomputes, formula in zip((True, False), formulas, strict=True):
            apart = count_attention_bytes(spec) + count_router_bytes(spec, widths)
            if not recomputes:
                apart += count_remade_router_bytes(spec, widths, None)
            two, one = (
                count_kept_bytes(spec, 3, tokens, recomputes=recomputes) for tokens in (2, 1)
            )
            assert 2 * evaluate(formula, letters) == two - one - apart, case


def test_the_page_has_all_families() -> None:
    assert [row[0] for row in read_rows("family")] == list(PAGE_CASES)


def test_the_page_has_the_bytes_of_llama3_8b() -> None:
    spec = cast(DecoderSpec, build_spec(read_preset_config("llama3/8B"), "8B"))
    expected = []
    for run, adapters in (
        ("full fine-tuning", None),
        ("LoRA of rank 16 on seven matrices", Adapters(16)),
    ):
        cells = [run]
        for recomputes in (True, False):
            two, one = (
                count_kept_bytes(
                    spec, 1, tokens, adapters=adapters, recomputes=recomputes, on_gpu=True
                )
                for tokens in (2, 1)
            )
            cells.append(f"{two - one:,} ({(two - one) / 1000:.1f} KB)")
        expected.append(cells)
    assert read_rows("run") == expected
    parts = [int(row[1].replace(",", "")) for row in read_rows("in the plan's table")]
    assert f"{sum(parts):,} " in expected[0][1]
