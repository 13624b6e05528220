"""Log lines: only the main rank speaks, and no line carries a secret."""

import logging
import os
import sys

from recipe_lib.redaction import redact


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
