"""Tokenizers: sentencepiece, tiktoken and tokenizer.json behind one class, and sandboxed chat
templates.
"""

from recipe_lib.tokenizers.template_process import RenderRequest
from recipe_lib.tokenizers.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

__all__ = ["RenderRequest", "StreamDecoder", "Tokenizer", "load_tokenizer"]
