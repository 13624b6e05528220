"""Log lines: only the main rank speaks, and no line carries a secret."""

import logging
import os
import re
import sys

_SECRET = re.compile(r"(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@))")
_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "TRACKIO_TOKEN")


def redact(text: str) -> str:
    """The text with tokens, API keys and passwords in addresses replaced by `[secret]`."""
    for name in _SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= 6:
            text = text.replace(value, "[secret]")
    return _SECRET.sub("[secret]", text)


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def get_logger() -> logging.Logger:
    """The logger of the project; it writes plain lines to standard error on rank 0 and warnings elsewhere."""
    logger = logging.getLogger("tune")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        rank = int(os.environ.get("RANK", "0"))
        handler.setFormatter(_RedactingFormatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.propagate = False
    return logger
