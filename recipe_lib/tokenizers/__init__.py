"""Tokenizers: sentencepiece, tiktoken and tokenizer.json behind one class, and sandboxed chat templates."""

from recipe_lib.tokenizers.load_tokenizer import load_tokenizer
from recipe_lib.tokenizers.template_process import RenderRequest
from recipe_lib.tokenizers.tokenizer import StreamDecoder, Tokenizer

__all__ = ["RenderRequest", "StreamDecoder", "Tokenizer", "load_tokenizer"]
