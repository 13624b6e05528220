"""Complete prompts: choose the next token, and run the loop around it."""
