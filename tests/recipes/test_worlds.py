"""Real weights on real text: the same losses on 1 and 2 ranks, those of a plain loop over
transformers' model, and an exported folder that transformers opens with equal logits.
"""

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentencepiece import SentencePieceProcessor
from torch.nn import functional as F

from recipe_lib.config import load_config
from recipe_lib.data import build_dataset
from recipe_lib.tokenizers import load_tokenizer
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    PLAIN,
    build_story_arguments,
    find_largest_difference,
    gather_whole,
    read_losses,
    read_metrics,
    read_steps,
    run_here,
)
from tests.selection import mark_slow_except, select_cases

GLOBAL_BATCH = 8
STEPS = 10
PEAK = 1e-3
WARMUP = 2
# What every step of the text, and of the Alpaca rows, is told by hand in `reference`.
DECAY = {"text": 0.0, "alpaca": 0.1}
# The text's last two losses are below those of the untrained model on the same rows by at least
# this, nats per token.
MARGIN = 1.0
WORLDS = (1, 2)


def overrides(realdata: Path, kind: str, ranks: int) -> list[str]:
    """What a run on `kind` of data sets, the global batch divided over the ranks."""
    sources = {"text": "text/tinyshakespeare.txt", "alpaca": "alpaca/alpaca_en_demo.json"}
    return [
        f"data.source={realdata / 'datasets' / sources[kind]}",
        f"data.format={kind}",
        "data.shuffle=false",
        f"batch_size={GLOBAL_BATCH // ranks}",
        f"max_steps={STEPS}",
        f"lr_scheduler.warmup_steps={WARMUP}",
        f"optimizer.weight_decay={DECAY[kind]}",
        *(["data.max_samples=96"] if kind == "alpaca" else []),
    ]


def probe() -> torch.Tensor:
    """Tokens `[2, 24]` to compare logits on."""
    return torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, realdata: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Any]:
    """(kind, ranks) -> output folder and logits of the trained model where it was trained."""
    folder, kinds = tmp_path_factory.mktemp("worlds"), select_cases(request, "kind")

    def train(ranks: int) -> dict[str, torch.Tensor]:
        logits = {}
        for kind in kinds:
            run = run_here(
                build_story_arguments(
                    realdata, folder / f"{kind}{ranks}", *overrides(realdata, kind, ranks)
                )
            )
            assert run.code == 0, run.said
            with torch.no_grad():
                logits[kind] = gather_whole(run.recipe.model(probe()))
        return logits

    found = {}
    for ranks in WORLDS:
        logits = run_ranks(train, ranks, ranks)[0]
        found |= {(kind, ranks): (folder / f"{kind}{ranks}", logits[kind]) for kind in kinds}
    return found


@pytest.mark.parametrize("kind", mark_slow_except(DECAY, ["text"]))
@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_more_ranks_give_the_losses_of_one(runs: dict[tuple[str, int], Any], kind: str, ranks: int):
    one, many = read_steps(runs[kind, 1][0]), read_steps(runs[kind, ranks][0])
    assert [step for step, _, _ in many] == list(range(1, STEPS + 1))
    assert (
        find_largest_difference([loss for _, loss, _ in many], [loss for _, loss, _ in one]) <= 1e-5
    )
    assert (
        find_largest_difference([norm for _, _, norm in many], [norm for _, _, norm in one]) <= 1e-4
    )
    for line, other in zip(
        read_metrics(runs[kind, 1][0]), read_metrics(runs[kind, ranks][0]), strict=True
    ):
        assert all(line[name] == other[name] for name in ("lr", "epoch", "label_tokens", "tokens"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text"])
def test_losses_fall(realdata: Path, runs: dict[tuple[str, int], Any], kind: str):
    untrained = [
        loss
        for loss, _ in reference(realdata / "stories260K-hf", data_rows(realdata, kind), peak=0.0)
    ]
    for ranks in WORLDS:
        found = read_losses(runs[kind, ranks][0])
        gained = [before - after for before, after in zip(untrained, found, strict=True)]
        assert abs(gained[0]) < 1e-4
        assert all(gain > 0 for gain in gained[1:]), gained
        assert sum(gained[-2:]) / 2 >= MARGIN, gained


@pytest.mark.parametrize("kind", mark_slow_except(DECAY, ["text"]))
@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_transformers_opens_the_result_with_equal_logits(
    runs: dict[tuple[str, int], Any], kind: str, ranks: int, caplog: pytest.LogCaptureFixture
):
    folder, ours = runs[kind, ranks]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as seen, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder / "model", output_loading_info=True
            )
    finally:
        logger.removeHandler(caplog.handler)
    assert [str(warning.message) for warning in seen] == []
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("transformers")
    ] == []
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    with torch.no_grad():
        theirs = model(probe()).logits
    untrained = transformers.AutoModelForCausalLM.from_pretrained(_original(folder))
    with torch.no_grad():
        assert not torch.allclose(untrained(probe()).logits, theirs, atol=0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _original(output: Path) -> Path:
    """The folder that a run started from, as its resolved config says."""
    return Path(load_config(output / "config.yaml").model.path)


@pytest.mark.parametrize("kind", mark_slow_except(DECAY, ["text"]))
def test_a_plain_loop_over_transformers_gives_the_same_losses(
    realdata: Path, runs: dict[tuple[str, int], Any], kind: str
):
    expected = reference(realdata / "stories260K-hf", data_rows(realdata, kind), decay=DECAY[kind])
    for ranks in WORLDS:
        found = read_steps(runs[kind, ranks][0])
        assert (
            find_largest_difference([loss for _, loss, _ in found], [loss for loss, _ in expected])
            <= 1e-4
        )
        assert (
            find_largest_difference([norm for _, _, norm in found], [norm for _, norm in expected])
            <= 1e-4
        )


def data_rows(realdata: Path, kind: str) -> list[tuple[list[int], list[bool]]]:
    """(ids, whether the loss counts them) of the first rows."""
    return text_rows(realdata) if kind == "text" else alpaca_rows(realdata)


def text_rows(realdata: Path) -> list[tuple[list[int], list[bool]]]:
    """The first pieces of the text, each of 129 ids, the first with BOS; one begins with the last
    of the one before.
    """
    model = SentencePieceProcessor(model_file=str(realdata / "stories260K-hf" / "tokenizer.model"))
    ids = [1, *model.encode((realdata / "datasets/text/tinyshakespeare.txt").read_text())]
    pieces = [ids[128 * number : 128 * number + 129] for number in range(GLOBAL_BATCH * STEPS)]
    return [(piece, [False] + [True] * 128) for piece in pieces]


def alpaca_rows(realdata: Path) -> list[tuple[list[int], list[bool]]]:
    """The recipe's own rows, whose lengths and trained shares differ much."""
    cfg = load_config(PLAIN, ["model.path=unused", *overrides(realdata, "alpaca", 1)])
    dataset = build_dataset(cfg.data, load_tokenizer(realdata / "stories260K-hf"), 128)
    rows = [dataset[number] for number in range(GLOBAL_BATCH * STEPS)]
    found = [
        ([*row.tokens.tolist(), max(0, int(row.labels[-1]))], [False, *(row.labels >= 0).tolist()])
        for row in rows
    ]
    assert (
        len({len(ids) for ids, _ in found}) > 10 and min(sum(trained) for _, trained in found) < 20
    )
    return found


def reference(
    folder: Path, rows: list[tuple[list[int], list[bool]]], peak: float = PEAK, decay: float = 0.0
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, in one process, without a line of the recipe's code."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay
    )
    found = []
    for step in range(STEPS):
        after = (step - WARMUP) / (STEPS - WARMUP)
        optimizer.param_groups[0]["lr"] = (
            peak * (step + 1) / WARMUP
            if step < WARMUP
            else peak * (1 + math.cos(math.pi * after)) / 2
        )
        batch = rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        width = max(len(ids) for ids, _ in batch)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        real = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
        counts = torch.tensor([trained + [False] * (width - len(trained)) for _, trained in batch])
        logits = model(tokens, attention_mask=real).logits
        likelihoods = (
            F.log_softmax(logits[:, :-1], dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        )
        loss = -likelihoods[counts[:, 1:]].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found
