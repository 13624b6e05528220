"""Random models of four families with the demo's tokenizer, and what transformers makes of the
demo's held-out rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

DEMO = Path(__file__).parents[2] / "examples" / "demo"
ROWS = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()[:10]]
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "phi3": Phi3Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
    ),
}


def write_model(family: str, folder: Path) -> Path:
    """A random model of the family with the demo's tokenizer; large weights, so that tokens
    differ.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family], attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    for file in (DEMO / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def write_rows(folder: Path) -> Path:
    """The rows as a file of samples."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@dataclass
class Sample:
    """prompt: with the template's opening of the answer; answer: with the token that ends it."""

    prompt: list[int]
    answer: list[int]


def write_samples(folder: Path) -> list[Sample]:
    """The rows as transformers' tokenizer has them: of the whole text, the answer is what follows
    the prompt.
    """
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for row in ROWS:
        turns = [{"role": "user", "content": row["instruction"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        end = tokenizer.apply_chat_template(
            [*turns, {"role": "assistant", "content": row["output"]}], tokenize=False
        )
        ids = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, end.rstrip())
        ]
        assert ids[1][: len(ids[0])] == ids[0]
        found.append(Sample(ids[0], ids[1][len(ids[0]) :]))
    return found


@torch.no_grad()
def compute_likelihood(model: torch.nn.Module, sample: Sample) -> tuple[float, int]:
    """(log-likelihood of the answer, how many of its tokens are the likeliest ones), by the plain
    forward.
    """
    tokens = torch.tensor([sample.prompt + sample.answer])
    log_probs = model(tokens).logits[0, len(sample.prompt) - 1 : -1].double().log_softmax(-1)
    answer = torch.tensor(sample.answer)
    return float(log_probs[torch.arange(len(answer)), answer].sum()), int(
        (log_probs.argmax(-1) == answer).sum()
    )


@torch.no_grad()
def answer(model: torch.nn.Module, tokenizer, sample: Sample, count: int) -> str:
    """What transformers' own greedy search says."""
    stop = sample.answer[-1]
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    prompt = torch.tensor([sample.prompt])
    mask = torch.ones_like(prompt)  # else each pad id of the prompt would be taken for padding
    ids = model.generate(prompt, attention_mask=mask, **options)[0, len(sample.prompt) :].tolist()
    return tokenizer.decode(
        ids[: ids.index(stop)] if stop in ids else ids, skip_special_tokens=True
    )
