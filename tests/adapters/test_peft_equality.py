"""Training with adapters equals PEFT on transformers: the same weights, beginnings, batches and
AdamW, step by step.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import sentencepiece
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from recipe_lib.adapters import add_adapters, get_adapter_parameters
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.config.schema import LoraConfig, LoraFinetuneConfig
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import Parallel, start_world
from recipe_lib.training import clip_grad_norm
from tests.selection import mark_slow_except

STEPS = 20
ROWS = 3
LENGTH = 64
LR = 5e-3
CLIP = 1.0
ADAM: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
LINEARS = ["q", "k", "v", "o", "gate", "up", "down"]
CASES = {
    "lora of q and v": LoraConfig(rank=8, alpha=16, target_modules=["q", "v"]),
    "dora": LoraConfig(rank=8, alpha=16, target_modules=LINEARS, dora=True),
    "rslora of embedding and head, which are tied": LoraConfig(
        rank=4, alpha=3, target_modules=["q", "embedding", "head"], rslora=True
    ),
    "dora of embedding and head": LoraConfig(
        rank=4, alpha=8, target_modules=["q", "embedding", "head"], dora=True
    ),
    "dora with dropout": LoraConfig(
        rank=8, alpha=16, target_modules=LINEARS, dora=True, dropout=0.1
    ),
}
Losses = list[tuple[float, float]]


def batches(realdata: Path) -> list[Tensor]:
    """A batch `[ROWS, LENGTH]` of tokens for every step."""
    text = (realdata / "datasets/text/tinyshakespeare.txt").read_text()[:40_000]
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_file=str(realdata / "stories260K-hf/tokenizer.model")
    )
    tokens = torch.tensor(tokenizer.encode(text))
    return list(tokens[: STEPS * ROWS * LENGTH].view(STEPS, ROWS, LENGTH))


def peft_model(folder: Path, cfg: LoraConfig) -> nn.Module:
    """transformers' model with new adapters of PEFT."""
    words = {"embedding": "embed_tokens", "head": "lm_head"}
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=cfg.rank,
        lora_alpha=int(cfg.alpha),
        lora_dropout=cfg.dropout,
        target_modules=[words.get(target, f"{target}_proj") for target in cfg.targets],
        use_rslora=cfg.rslora,
        use_dora=cfg.dora,
    )
    torch.manual_seed(11)
    model = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), settings
    )
    return model.train()


def our_name(theirs: str) -> str:
    name = theirs.removeprefix("base_model.model.").replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


def train_theirs(model: nn.Module, data: list[Tensor]) -> Losses:
    """Loss and gradient norm of every step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAM)
    found = []
    for step, tokens in enumerate(data):
        torch.manual_seed(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def our_model(folder: Path, cfg: LoraConfig, beginning: dict[str, Tensor]) -> Decoder:
    """Our decoder with the checkpoint's weights and the adapters that PEFT's begins with."""
    spec = build_spec(read_config(folder), str(folder))
    model = build_meta(spec, torch.float32)
    add_adapters(model, cfg, torch.float32)
    model.to_empty(device="cpu")
    load_weights(model, spec, folder)
    adapters = get_adapter_parameters(model)
    assert adapters.keys() == beginning.keys()
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(beginning[name])
    return model


def train_ours(model: Decoder, cfg: LoraConfig, data: list[Tensor]) -> Losses:
    trained = list(get_adapter_parameters(model).values())
    optimizer = torch.optim.AdamW(trained, **ADAM)
    found = []
    with start_world(LoraFinetuneConfig(device="cpu", lora=cfg)) as world:
        for step, tokens in enumerate(data):
            torch.manual_seed(step)
            labels = torch.cat([tokens[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
            loss = model(tokens, labels=labels, head_loss=CrossEntropy(4)) / (labels != -100).sum()
            loss.backward()
            norm = clip_grad_norm(trained, CLIP, world, Parallel(), None)
            optimizer.step()
            optimizer.zero_grad()
            found.append((float(loss.detach()), float(norm)))
    return found


@pytest.mark.parametrize("case", mark_slow_except(CASES, ["lora of q and v", "dora"]))
def test_twenty_steps_equal_those_of_peft(case: str, realdata: Path) -> None:
    cfg, folder, data = CASES[case], realdata / "stories260K-hf", batches(realdata)
    theirs = peft_model(folder, cfg)
    beginning = {
        our_name(name): parameter.detach().clone()
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    ours = our_model(folder, cfg, beginning)
    wanted, found = train_theirs(theirs, data), train_ours(ours, cfg, data)
    assert sum(loss for loss, _ in wanted[:5]) - sum(loss for loss, _ in wanted[-5:]) > 0.5, (
        "the reference does not learn: the comparison would say little"
    )
    for step, ((loss, norm), (their_loss, their_norm)) in enumerate(
        zip(found, wanted, strict=True)
    ):
        assert abs(loss - their_loss) < 1e-4, (step, loss, their_loss)
        assert abs(norm - their_norm) < 1e-3, (step, norm, their_norm)
