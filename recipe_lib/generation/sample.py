"""Generate text with a model: after one prompt, for a batch of prompts, in a conversation.

`tune generate` uses `generate`, `generate_batch` and `Chat`. `tune eval` asks held-out samples:
`build_questions` takes a question (prompt and reference answer) from each sequence of a dataset,
`generate_answers` asks them on all ranks, `compute_metric` compares by a registered metric.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from recipe_lib.config.registry import get_registered, register
from recipe_lib.config.suggest import show
from recipe_lib.data import Dataset, render_prompt
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.models import Decoder, DecoderSpec, KVCache, ModelSpec
from recipe_lib.ops.attention import AttentionInfo, make_attention_info
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.parallel import World, derive_seed
from recipe_lib.report.phases import phase
from recipe_lib.tokenizers import StreamDecoder, Tokenizer

# A function of the tokens `[b, s]` that follow those of the calls before, to the logits `[b, v]`
# after the last of them. It keeps what was read, so each token is computed once.
Reader = Callable[[Tensor], Tensor]

# Why an answer ended: at a stop token, or at a limit of its length.
STOP = "stop"
LENGTH = "length"


def compute_next_probabilities(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return the probabilities `[b, v]` (fp32) that next tokens are drawn from, of logits `[b, v]`.

    temperature divides the logits. top_k then keeps the k likeliest tokens; top_p keeps, of those
    and by their renormalized probabilities, the fewest likeliest whose sum reaches p (arXiv
    1904.09751), at least one. Raises ValueError for a temperature of 0 or less.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: probabilities need one above 0")
    ordered, order = (logits.float() / temperature).sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if top_p is not None:
        # The sum of the probabilities of all likelier tokens.
        sum_before = probabilities.cumsum(dim=-1) - probabilities
        is_beyond = sum_before >= top_p
        is_beyond[..., 0] = False  # the likeliest is kept even for a top_p of 0
        probabilities = probabilities.masked_fill(is_beyond, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)


def sample_next(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return ids `[b]` of the next tokens, given logits `[b, v]`: the likeliest, or drawn.

    temperature: 0 for the likeliest. top_k, top_p: see `compute_next_probabilities`. generator: the
    source of randomness, on the logits' device; None: torch's own.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = compute_next_probabilities(
        logits, temperature=temperature, top_k=top_k, top_p=top_p
    )
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
    """Yield the ids that follow `tokens` (at least one), as they are chosen.

    It ends before the first id in `stop_ids`, after `max_new_tokens`, or when prompt and completion
    are as long as the model was made for (`spec.max_positions`). temperature, top_k, top_p,
    generator: see `sample_next`. Raises ValueError without tokens.
    """
    if not tokens:
        raise ValueError("generate needs at least one token to begin from")
    count = min(max_new_tokens, spec.max_positions - len(tokens))
    read = make_prompt_reader(
        model, spec=spec, lengths=[len(tokens)], room=len(tokens) + max(count, 0)
    )
    # `[1, s]`, later `[1, 1]`
    unread = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    for _ in range(count):
        chosen = sample_next(
            read(unread), temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
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
    """Return a `Reader` for a batch of prompts, whose first call takes the prompts.

    Prompts are padded on the left to the longest, so that their next tokens stand in one column.

    lengths: tokens of each prompt. room: tokens of a row in all, padding included. device: that
    computes; None: where the model's weights are.
    """
    longest = max(lengths)
    weight = next(model.parameters())
    device = device or weight.device
    padding = torch.tensor([longest - length for length in lengths], device=device)
    has_padding = min(lengths) < longest
    if not isinstance(spec, DecoderSpec):  # a model of another library has a cache of its own
        return cast(Any, model).build_token_reader(padding if has_padding else None)
    cache = KVCache(spec, batch=len(lengths), max_len=room, dtype=weight.dtype, device=device)
    # The padding is a document of its own, as in a packed row: no token of the prompt sees it.
    documents = [[longest - length, length] if length < longest else [length] for length in lengths]
    prompt_info = make_attention_info(documents, longest).to(device) if has_padding else None

    def read(unread: Tensor) -> Tensor:
        past = cache.length
        positions = None
        attention_info = None
        if prompt_info is not None:
            end = past + unread.shape[1]
            # Positions count from the prompt's first token.
            positions = (torch.arange(past, end, device=device) - padding[:, None]).clamp(min=0)
            attention_info = prompt_info if past == 0 else _extend_documents(prompt_info, end)
        return model(unread, positions, attention_info, cache=cache, logits_to_keep=1)[:, -1]

    return read


def _extend_documents(attention_info: AttentionInfo, length: int) -> AttentionInfo:
    """Return the info of the rows after their last document has grown.

    length: tokens of a row, at least as many as in `attention_info`.
    """
    assert attention_info.documents is not None
    rows, known_length = attention_info.documents.shape
    added = attention_info.documents[:, -1:].expand(rows, length - known_length)
    documents = torch.cat([attention_info.documents, added], dim=1)
    # These two describe the shorter rows.
    return replace(attention_info, documents=documents, boundaries=None, real=None)


@dataclass
class Generated:
    """An answer to a prompt."""

    tokens: list[int] = field(default_factory=list)  # ids, without the stop token
    ended: str = LENGTH  # `STOP` at a stop token, `LENGTH` at a limit


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
    """Return an answer to each prompt (ids, at least one each), as `generate` gives it alone.

    With longrope an answer may differ, as its rotations depend on the longest row of the batch. An
    answer ends before a stop id, after `max_new_tokens`, or at `spec.max_positions` with its
    prompt. Raises ValueError for an empty prompt, and above temperature 0 without a seed for each.

    Args:
        model: may be sharded over ranks.
        spec: of the model.
        prompts: ids of each.
        max_new_tokens: the most tokens of an answer.
        stop_ids: ids that end an answer.
        temperature, top_k, top_p: see `sample_next`.
        seeds: of each prompt's random numbers, so that an answer does not depend on its batch.
        device: that computes; None: that of the weights.
        any_over_ranks: returns True if its argument is True on any rank; given where the weights
            are sharded. All ranks then read until the last one is done, one without prompts too.
    """
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError(
            f"{len(prompts)} prompts at temperature {temperature}: a seed for each is needed"
        )
    if not all(prompts):
        raise ValueError("generate_batch needs at least one token in each prompt to begin from")
    device = device or next(model.parameters()).device
    batches = [list(range(len(prompts)))]  # numbers of prompts
    reads_padding = isinstance(spec, DecoderSpec) or cast(Any, model).reads_padding
    # A model that cannot leave padding out gets one prompt at a time. With sharded weights all
    # ranks must take the same steps, so there even such a model gets batches.
    if not reads_padding and any_over_ranks is None:
        batches = [[number] for number in batches[0]]
    answers = [Generated() for _ in prompts]
    for prompt_numbers in batches:
        # A rank without prompts reads a token, to take part in the collectives.
        rows = [list(prompts[number]) for number in prompt_numbers] or [[0]]
        longest = max(map(len, rows))
        read = make_prompt_reader(
            model, spec, [len(row) for row in rows], room=longest + max_new_tokens, device=device
        )
        generators = [
            torch.Generator(device).manual_seed(seeds[number]) for number in prompt_numbers if seeds
        ]

        # The defaults bind this batch's reader and generators.
        def choose_next(
            unread: Tensor, read: Reader = read, generators: Sequence[torch.Generator] = generators
        ) -> Tensor:
            logits = read(unread)
            if temperature == 0 or not generators:
                return sample_next(logits)
            chosen = [
                sample_next(
                    row, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
                )
                for row, generator in zip(logits.split(1), generators, strict=True)
            ]
            return torch.cat(chosen)

        # The padding repeats a row's first token: any id would do, as nothing sees it.
        _extend_answers(
            [answers[number] for number in prompt_numbers],
            room=[min(max_new_tokens, spec.max_positions - len(row)) for row in rows],
            stop_ids=frozenset(stop_ids),
            choose_next=choose_next,
            unread=torch.tensor(
                [[row[0]] * (longest - len(row)) + row for row in rows], device=device
            ),
            any_over_ranks=any_over_ranks or bool,
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
    any_over_ranks: Callable[[bool], bool],
    max_new_tokens: int,
) -> None:
    """Add tokens to the answers of a batch until each has come to its end.

    answers: fewer than rows where a rank has no prompts. room: tokens that each row may get.
    choose_next: maps tokens `[b, s]` that follow those before to the next ids `[b]`. unread: the
    padded prompts `[b, s]`.
    """
    open_rows = [row for row in range(len(answers)) if room[row] > 0]
    for _ in range(max_new_tokens):
        if not any_over_ranks(bool(open_rows)):
            return
        chosen = choose_next(unread)
        unread = chosen[:, None]
        tokens = chosen.tolist()
        # Rows that have ended are still read with the others, and what follows in them is dropped.
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


NO_ANSWER = "the model ended its answer before the first word"


def check_prompt(tokens: list[int], spec: ModelSpec, what: str) -> None:
    """Raise ConfigError for a prompt that leaves no position for an answer.

    Raises CheckpointError for ids that the model does not know. what: names the prompt in the
    error, such as `--prompt`.
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
    """Yield the same tokens; a terminal shows that a prompt of `count` tokens is being read.

    The line is gone before the first token is given, so that text can be printed.
    """
    with phase(f"reading the prompt of {count:,} tokens", leaves_line=False):
        first = next(tokens, None)
    if first is not None:
        yield first
        yield from tokens


class Chat:
    """A conversation with a model: `for piece in chat.answer(question): print(piece)`."""

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        system: str | None,
        options: dict[str, Any],
    ) -> None:
        """Begin a conversation.

        system: the system's message, before the first question; None: none. options: keyword
        arguments of `generate`.
        """
        self._model = model
        self._spec = spec
        self._tokenizer = tokenizer
        self._options = options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        # In words, the limit that ended the last answer; empty if the model ended it.
        self.why_ended = ""
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system's message."""
        # The messages so far, dicts of `role` and `content`; with the system's.
        self.messages = list(self._system)

    def answer(self, question: str) -> Generator[str]:
        """Yield the answer, piece by piece; question and answer then are part of the history.

        So is an answer that is broken off, as far as it has come. Raises DataError if the chat
        template refuses the messages, and ConfigError if they leave no position for an answer. Both
        come before the first piece, and leave the history as it was.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = render_prompt(self._tokenizer, messages)
        check_prompt(prompt, self._spec, "the conversation")
        decoder = StreamDecoder(self._tokenizer, prompt)
        tokens = generate(self._model, self._spec, prompt, **self._options)
        pieces: list[str] = []
        count = 0
        is_finished = False
        self.why_ended = ""
        try:
            for token in show_prompt_phase(tokens, len(prompt)):
                count += 1
                pieces.append(decoder.push(token))
                yield pieces[-1]
            pieces.append(decoder.finish())
            yield pieces[-1]
            is_finished = True
        finally:  # also if the caller closes the generator
            text = "".join(pieces)
            if is_finished or text.strip():
                self.messages = [*messages, {"role": "assistant", "content": text}]
        self.why_ended = self._describe_limit(len(prompt), count)
        if not self.why_ended and not text:
            self.why_ended = NO_ANSWER

    def _describe_limit(self, prompt_length: int, count: int) -> str:
        """Return in words the limit that an answer of `count` tokens has come to; empty: none."""
        if prompt_length + count >= self._spec.max_positions:
            return f"all {self._spec.max_positions} positions of the model are taken"
        limit = self._options["max_new_tokens"]
        return f"stopped after {limit} tokens (--max-new-tokens)" if count >= limit else ""


@dataclass(frozen=True)
class Question:
    """The last answer of a sample, to compare with the model's, and the prompt before it."""

    prompt: list[int]  # ids that come before the answer
    reference: list[int]  # ids of the answer, without its stop token


def build_questions(dataset: Dataset, stop_ids: Collection[int]) -> dict[int, Question]:
    """Return the question of each sequence that has one, by the sequence's number.

    The answer is the last run of label tokens, those that the loss counts. A sequence is left out
    where nothing comes before its label tokens (plain text), or where no stop token ends them, as
    `max_seq_len` has cut the answer.
    """
    questions = dict[int, Question]()
    for number in range(len(dataset)):
        sequence = dataset[number]
        label_positions = np.flatnonzero(sequence.labels != IGNORED)
        if not len(label_positions):
            continue
        last = int(label_positions[-1])
        unlabeled_before = np.flatnonzero(sequence.labels[:last] == IGNORED)
        if len(unlabeled_before) and int(sequence.labels[last]) in stop_ids:
            # In a conversation of several turns the last answer begins after the last question.
            start = int(unlabeled_before[-1]) + 1
            answer = sequence.labels[start:last].tolist()
            # The label at a position is the next token, so the prompt includes position `start`.
            prompt = sequence.tokens[: start + 1].tolist()
            questions[number] = Question(prompt=prompt, reference=answer)
    return questions


def generate_answers(
    model: Any,
    spec: ModelSpec,
    questions: Mapping[int, Question],
    world: World,
    *,
    batch_size: int,
    seed: int,
    **options: Any,
) -> dict[int, Generated]:
    """Return the answers to all questions, by the sequence's number, on every rank. Collective.

    The ranks share out the questions. They read in step, as each may have a part of the weights.

    batch_size: questions of a rank at a time. seed: root of the seeds of the questions. options:
    keyword arguments of `generate_batch`.
    """
    question_numbers = sorted(questions)
    own_answers: list[tuple[int, list[int], str]] = []  # number, ids, STOP or LENGTH
    # Every rank goes through all batches, perhaps with an empty one.
    for start in range(0, len(question_numbers), batch_size * world.size):
        first = start + world.rank * batch_size
        own_numbers = question_numbers[first : first + batch_size]
        answers = generate_batch(
            model,
            spec,
            [questions[number].prompt for number in own_numbers],
            # By number, so that an answer does not depend on how many ranks there are.
            seeds=[derive_seed(seed, f"answer {number}") for number in own_numbers],
            device=world.device,
            any_over_ranks=world.any if world.size > 1 else None,
            **options,
        )
        own_answers += [
            (number, answer.tokens, answer.ended)
            for number, answer in zip(own_numbers, answers, strict=True)
        ]
    gathered = sorted(row for rows in world.gather_json(own_answers) for row in rows)
    return {number: Generated(tokens, ended) for number, tokens, ended in gathered}


def compute_metric(
    name: str,
    answers: Mapping[int, Generated],
    questions: Mapping[int, Question],
    tokenizer: Tokenizer,
) -> dict[int, float]:
    """Return a registered metric of each answer, by the sequence's number.

    name: as of `register("metric", name)`. Raises ConfigError for a metric that raises, or gives no
    number.
    """
    metric = get_registered("metric", name)
    values: dict[int, float] = {}
    for number, question in questions.items():
        prediction = tokenizer.decode(answers[number].tokens, skip_special=True)
        reference = tokenizer.decode(question.reference, skip_special=True)
        try:
            values[number] = float(metric(prediction, reference))
        except Exception as error:  # whatever a user's function raises is theirs to correct
            raise ConfigError(
                f"metric {name}: raised {type(error).__name__} for the answer of sequence {number}:"
                f" {show(str(error))}"
            ) from error
    return values


# A metric is `fn(prediction, reference) -> number`, averaged over all answers. A plugin registers
# its own by `register("metric", "name")`. prediction: the text that the model gave. reference: that
# of the sample. Both are without the token that ends an answer.


@register("metric", "exact_match")
def exact_match(prediction: str, reference: str) -> float:
    """Return 1 for the same text, letter for letter, else 0."""
    return float(prediction == reference)
