"""Models and adapters as GGUF files, which llama.cpp, Ollama and others load."""
