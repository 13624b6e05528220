"""Encode text by sentencepiece, tiktoken or tokenizer.json; render chat templates in a sandbox."""

from recipe_lib.tokenizers.template_process import RenderRequest
from recipe_lib.tokenizers.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

__all__ = ["RenderRequest", "StreamDecoder", "Tokenizer", "load_tokenizer"]
