"""Completing a prompt: choosing the next token, and the loop around it."""
