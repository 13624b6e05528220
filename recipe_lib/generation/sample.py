"""Next tokens from logits, and the loop that appends them: `[1, s]` tokens in, ids out one by one.

What reads the tokens of a batch of prompts, and those that follow, each once: keys and values are
kept.

Prompts of different lengths are padded on the left, so that their next tokens stand in one column.
Padding is a document of its own (`AttentionInfo.documents`), which no token of the prompt sees, and
positions count from the prompt's first token.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from recipe_lib.data import render_prompt
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.models.decoder import Decoder, KVCache
from recipe_lib.models.spec import DecoderSpec, ModelSpec
from recipe_lib.ops.attention import AttentionInfo, make_attention_info
from recipe_lib.report.phases import phase
from recipe_lib.tokenizers import StreamDecoder, Tokenizer

Reader = Callable[[Tensor], Tensor]


def compute_next_probabilities(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities `[b, v]` (fp32) that the next token is drawn from, given logits `[b, v]`.

    temperature (> 0) divides the logits. top_k then keeps the k likeliest tokens; top_p keeps, of
    those and by their renormalized probabilities, the fewest likeliest whose sum reaches p (arXiv
    1904.09751), at least one.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: probabilities need one above 0")
    ordered, order = (logits.float() / temperature).sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if top_p is not None:
        likelier = probabilities.cumsum(dim=-1) - probabilities  # sum over the tokens before each
        likelier[..., 0] = 0.0
        beyond = likelier >= top_p
        beyond[..., 0] = False
        probabilities = probabilities.masked_fill(beyond, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)


def sample_next(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Ids `[b]` of the next tokens, given logits `[b, v]`: the likeliest (temperature 0), or drawn.

    generator: the source of randomness, on the logits' device; None: torch's own.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = compute_next_probabilities(logits, temperature, top_k, top_p)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def generate(
    model: Decoder,
    spec: ModelSpec,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Ids that follow `tokens` (at least one), as they are chosen.

    It ends before the first id in `stop_ids`, after `max_new_tokens`, or when prompt and completion
    are as long as the model was made for (`spec.max_positions`). Keys and values are kept, so each
    token is computed once.
    """
    if not tokens:
        raise ValueError("generate needs at least one token to begin from")
    count = min(max_new_tokens, spec.max_positions - len(tokens))
    read = make_prompt_reader(model, spec, [len(tokens)], len(tokens) + max(count, 0))
    unread = torch.tensor(
        [list(tokens)], device=next(model.parameters()).device
    )  # [1, s], later [1, 1]
    for _ in range(count):
        chosen = sample_next(read(unread), temperature, top_k, top_p, generator)
        token = int(chosen)
        if token in stop_ids:
            return
        yield token
        unread = chosen[:, None]


def make_prompt_reader(
    model: Decoder,
    spec: ModelSpec,
    lengths: Sequence[int],
    room: int,
    device: torch.device | None = None,
) -> Reader:
    """A function of tokens `[b, s]`, those that follow each time, to the logits `[b, v]` after the
    last of them.

    lengths: tokens of each prompt; the first call's are padded on the left to the longest of them.
    room: tokens of a row in all, padding included. device: that computes; None: where the model's
    weights are.
    """
    longest = max(lengths)
    weight = next(model.parameters())
    device = device or weight.device
    padding = torch.tensor([longest - length for length in lengths], device=device)
    padded = min(lengths) < longest
    if not isinstance(spec, DecoderSpec):
        return cast(Any, model).token_reader(padding if padded else None)
    cache = KVCache(spec, len(lengths), room, weight.dtype, device)
    # The first document of a row is its padding.
    documents = [[longest - length, length] if length < longest else [length] for length in lengths]
    first = make_attention_info(documents, longest).to(device) if padded else None

    def read(unread: Tensor) -> Tensor:
        past, count = cache.length, unread.shape[1]
        positions, info = None, None
        if first is not None:
            places = torch.arange(past, past + count, device=device)
            positions = (places - padding[:, None]).clamp(min=0)
            info = first if past == 0 else _extend_documents(first, past + count)
        return model(unread, positions, info, cache=cache, logits_to_keep=1)[:, -1]

    return read


def _extend_documents(info: AttentionInfo, length: int) -> AttentionInfo:
    """Rows whose last document has grown to so many tokens."""
    assert info.documents is not None
    rows, known = info.documents.shape
    grown = info.documents[:, -1:].expand(rows, length - known)
    return replace(
        info, documents=torch.cat([info.documents, grown], dim=1), boundaries=None, real=None
    )


# Answers to many prompts at once: of different lengths in a batch, each with its own end and random
# numbers.

STOP, LENGTH = "stop", "length"


@dataclass
class Generated:
    """tokens: the answer's ids, without the stop token. ended: `stop` at a stop token, `length` at
    a limit.
    """

    tokens: list[int] = field(default_factory=list)
    ended: str = LENGTH


@torch.no_grad()
def generate_batch(
    model: Decoder,
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    device: torch.device | None = None,
    any_over_ranks: Callable[[bool], bool] | None = None,
) -> list[Generated]:
    """An answer to each prompt (ids, at least one each), as `generate` gives it to that prompt
    alone.

    An answer ends before a stop id, after `max_new_tokens`, or at `spec.max_positions` with its
    prompt. temperature, top_k, top_p: see `sample_next`; seeds: of each prompt's random numbers
    (needed above temperature 0), so that an answer does not depend on its batch. device: that
    computes; None: that of the weights. any_over_ranks: whether a bool is true on any rank, of a model
    whose weights are sharded over ranks, which then read as many tokens as each other; a rank
    without prompts reads along. The rotations of longrope depend on the longest row.
    """
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError(
            f"{len(prompts)} prompts at temperature {temperature}: a seed for each is needed"
        )
    if not all(prompts):
        raise ValueError("generate_batch needs at least one token in each prompt to begin from")
    device = device or next(model.parameters()).device
    groups = [list(range(len(prompts)))]
    if (
        not isinstance(spec, DecoderSpec)
        and any_over_ranks is None
        and not cast(Any, model).reads_padding
    ):
        groups = [[number] for number in groups[0]]
    answers = [Generated() for _ in prompts]
    for numbers in groups:
        rows = [list(prompts[number]) for number in numbers] or [[0]]
        longest = max(map(len, rows))
        read = make_prompt_reader(
            model, spec, [len(row) for row in rows], longest + max_new_tokens, device
        )
        generators = (
            [torch.Generator(device).manual_seed(seeds[number]) for number in numbers]
            if seeds
            else []
        )

        def choose_next(
            unread: Tensor, read: Reader = read, generators: Sequence[torch.Generator] = generators
        ) -> Tensor:
            logits = read(unread)
            if temperature == 0 or not generators:
                return sample_next(logits)
            options = (temperature, top_k, top_p)
            parts = zip(logits.split(1), generators, strict=True)
            return torch.cat([sample_next(row, *options, generator) for row, generator in parts])

        # What stands in the padding is read by nothing.
        padded = torch.tensor(
            [[row[0]] * (longest - len(row)) + row for row in rows], device=device
        )
        _extend_answers(
            [answers[number] for number in numbers],
            room=[min(max_new_tokens, spec.max_positions - len(row)) for row in rows],
            stop_ids=frozenset(stop_ids),
            choose_next=choose_next,
            unread=padded,
            any_rank=any_over_ranks or bool,
            max_new_tokens=max_new_tokens,
        )
    return answers


def _extend_answers(
    answers: Sequence[Generated],
    *,
    room: Sequence[int],
    stop_ids: Collection[int],
    choose_next: Reader,
    unread: Tensor,
    any_rank: Callable[[bool], bool],
    max_new_tokens: int,
) -> None:
    """Add tokens to the answers of a batch until each has come to its end. room: tokens that each
    may have.
    """
    open_rows = [row for row in range(len(answers)) if room[row] > 0]
    for _ in range(max_new_tokens):
        if not any_rank(bool(open_rows)):
            return
        chosen = choose_next(unread)
        unread = chosen[:, None]
        tokens = chosen.tolist()
        for row in open_rows:
            if tokens[row] in stop_ids:
                answers[row].ended = STOP
            else:
                answers[row].tokens.append(tokens[row])
        open_rows = [
            row
            for row in open_rows
            if answers[row].ended != STOP and len(answers[row].tokens) < room[row]
        ]


# A conversation with a model: its history, and the answers as they are made.

NO_ANSWER = "the model ended its answer before the first word"


def check_prompt(tokens: list[int], spec: ModelSpec, what: str) -> None:
    """ConfigError for a prompt that leaves no position for an answer, CheckpointError for ids that
    the model does not know. what: the prompt, in the error.
    """
    if len(tokens) >= spec.max_positions:
        raise ConfigError(
            f"{what}: {len(tokens)} tokens; the model takes {spec.max_positions}, completion"
            " included"
        )
    if max(tokens) >= spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer writes the prompt with the id {max(tokens)}, the model knows ids up to "
            f"{spec.vocab_size - 1}; check that tokenizer and weights are of one model"
        )


def show_prompt_phase(tokens: Iterator[int], count: int) -> Iterator[int]:
    """The same tokens. Until the first is there, which takes reading the prompt of `count` tokens,
    a terminal shows that; what it shows is gone before the token is given, so that text can be
    printed.
    """
    with phase(f"reading the prompt of {count:,} tokens", leaves_line=False):
        first = next(tokens, None)
    if first is not None:
        yield first
        yield from tokens


class Chat:
    """messages: what was said so far, the system's message included. why_ended: of the last answer,
    in words, where it was not the model that ended it, or nothing was answered; empty otherwise.
    """

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        system: str | None,
        options: dict[str, Any],
    ) -> None:
        """system: what stands before the first question. options: those of `generate`."""
        self._model, self._spec, self._tokenizer, self._options = model, spec, tokenizer, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.why_ended = ""
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system's message."""
        self.messages = list(self._system)

    def answer(self, question: str) -> Generator[str]:
        """The answer, piece by piece; question and answer then are part of the history, and as far
        as it has come so is an answer that is broken off. Raises DataError and ConfigError before
        the first piece; then nothing was said.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = render_prompt(self._tokenizer, asked)
        check_prompt(prompt, self._spec, "the conversation")
        text, parts, count, ended = StreamDecoder(self._tokenizer, prompt), [], 0, False
        self.why_ended = ""
        try:
            for token in show_prompt_phase(
                generate(self._model, self._spec, prompt, **self._options), len(prompt)
            ):
                count += 1
                parts.append(text.push(token))
                yield parts[-1]
            parts.append(text.finish())
            yield parts[-1]
            ended = True
        finally:
            said = "".join(parts)
            if ended or said.strip():
                self.messages = [*asked, {"role": "assistant", "content": said}]
        self.why_ended = self._describe_limit(len(prompt), count) or (
            NO_ANSWER if not "".join(parts) else ""
        )

    def _describe_limit(self, asked: int, count: int) -> str:
        """Which limit an answer of so many tokens has come to."""
        if asked + count >= self._spec.max_positions:
            return f"all {self._spec.max_positions} positions of the model are taken"
        most = self._options["max_new_tokens"]
        return f"stopped after {most} tokens (--max-new-tokens)" if count >= most else ""
