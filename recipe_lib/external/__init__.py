"""Models that transformers, or a plugin, implements: read, called, adapted and sharded as our
decoder is.
"""
