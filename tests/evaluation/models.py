"""Write random models of four families, and compute with transformers what `tune` has to give.

Tokenizer and rows are the demo's; `encode_samples`, `compute_likelihood` and `generate_answer` are
the reference for evaluation and generation.
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
# Ten rows in the format alpaca.
ROWS = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()[:10]]
SIZES = {  # of config.json, of every family
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, PreTrainedConfig] = {  # name -> config of its model
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
    """Write a random model of one of FAMILIES with the demo's tokenizer; return its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family], attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.15)  # large, so that the likeliest tokens differ
    model.save_pretrained(folder)
    for file in (DEMO / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def write_rows(folder: Path) -> Path:
    """Write the demo's rows as a file of samples and return its path."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@dataclass
class Sample:
    """Token ids of a conversation of one prompt and one answer."""

    prompt: list[int]  # with what the chat template opens an answer with
    answer: list[int]  # with the token that ends it


def encode_samples(folder: Path) -> list[Sample]:
    """Return the demo's rows as transformers' tokenizer in `folder` encodes them.

    The answer's tokens are those that follow the prompt's in the conversation.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = []
    for row in ROWS:
        turns = [{"role": "user", "content": row["instruction"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        turns.append({"role": "assistant", "content": row["output"]})
        conversation = tokenizer.apply_chat_template(turns, tokenize=False).rstrip()
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = tokenizer(conversation, add_special_tokens=False)["input_ids"]
        assert ids[: len(prompt_ids)] == prompt_ids
        samples.append(Sample(prompt_ids, ids[len(prompt_ids) :]))
    return samples


@torch.no_grad()
def compute_likelihood(model: torch.nn.Module, sample: Sample) -> tuple[float, int]:
    """Return (log-likelihood of the answer, number of its tokens that are the likeliest ones)."""
    tokens = torch.tensor([sample.prompt + sample.answer])
    log_probs = model(tokens).logits[0, len(sample.prompt) - 1 : -1].double().log_softmax(-1)
    answer_ids = torch.tensor(sample.answer)
    log_likelihood = log_probs[torch.arange(len(answer_ids)), answer_ids].sum()
    num_likeliest = (log_probs.argmax(-1) == answer_ids).sum()
    return float(log_likelihood), int(num_likeliest)


@torch.no_grad()
def generate_answer(model: torch.nn.Module, tokenizer, sample: Sample, count: int) -> str:
    """Return the text of at most `count` tokens that transformers generates greedily."""
    stop = sample.answer[-1]
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    prompt = torch.tensor([sample.prompt])
    mask = torch.ones_like(prompt)  # else each pad id of the prompt would be taken for padding
    ids = model.generate(prompt, attention_mask=mask, **options)[0, len(sample.prompt) :].tolist()
    if stop in ids:
        ids = ids[: ids.index(stop)]
    return tokenizer.decode(ids, skip_special_tokens=True)
