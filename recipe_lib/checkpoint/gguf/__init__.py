"""Models and adapters as GGUF files, which llama.cpp, Ollama and others load."""

from recipe_lib.checkpoint.gguf.gguf_adapter import write_gguf_adapter, write_gguf_model

__all__ = ["write_gguf_adapter", "write_gguf_model"]
