"""A conversation with a model: its history, and the answers as they are made."""

from collections.abc import Generator, Iterator
from typing import Any

from recipe_lib.data import render_prompt
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.generation.sample import generate
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.spec import ModelSpec
from recipe_lib.report.phases import phase
from recipe_lib.tokenizers import StreamDecoder, Tokenizer

NO_ANSWER = "the model ended its answer before the first word"


def check_prompt(tokens: list[int], spec: ModelSpec, what: str) -> None:
    """ConfigError for a prompt that leaves no position for an answer, CheckpointError for ids that the model does not
    know. what: the prompt, in the error."""
    if len(tokens) >= spec.max_positions:
        raise ConfigError(f"{what}: {len(tokens)} tokens; the model takes {spec.max_positions}, completion included")
    if max(tokens) >= spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer writes the prompt with the id {max(tokens)}, the model knows ids up to "
            f"{spec.vocab_size - 1}; check that tokenizer and weights are of one model"
        )


def prompted(tokens: Iterator[int], count: int) -> Iterator[int]:
    """The same tokens. Until the first is there, which takes reading the prompt of `count` tokens, a terminal shows
    that; what it shows is gone before the token is given, so that text can be printed."""
    with phase(f"reading the prompt of {count:,} tokens", leaves_line=False):
        first = next(tokens, None)
    if first is not None:
        yield first
        yield from tokens


class Chat:
    """messages: what was said so far, the system's message included. why_ended: of the last answer, in words, where
    it was not the model that ended it, or nothing was answered; empty otherwise."""

    def __init__(
        self, model: Decoder, spec: ModelSpec, tokenizer: Tokenizer, system: str | None, options: dict[str, Any]
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
        """The answer, piece by piece; question and answer then are part of the history, and as far as it has come so is
        an answer that is broken off. Raises DataError and ConfigError before the first piece; then nothing was said."""
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = render_prompt(self._tokenizer, asked)
        check_prompt(prompt, self._spec, "the conversation")
        text, parts, count, ended = StreamDecoder(self._tokenizer, prompt), [], 0, False
        self.why_ended = ""
        try:
            for token in prompted(generate(self._model, self._spec, prompt, **self._options), len(prompt)):
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
        self.why_ended = self._limit(len(prompt), count) or (NO_ANSWER if not "".join(parts) else "")

    def _limit(self, asked: int, count: int) -> str:
        """Which limit an answer of so many tokens has come to."""
        if asked + count >= self._spec.max_positions:
            return f"all {self._spec.max_positions} positions of the model are taken"
        most = self._options["max_new_tokens"]
        return f"stopped after {most} tokens (--max-new-tokens)" if count >= most else ""
