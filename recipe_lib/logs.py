"""Log lines: only the main rank speaks, and no line carries a secret."""

import logging
import os
import sys

from recipe_lib.redaction import redact


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def silence_torchao() -> None:
    """Drops the lines that importing torchao, which transformers and PEFT do, prints about kernels nobody asked for.

    Libraries of its wheel that were built for another torch or GPU, and a deprecation of torch's that it meets: no
    other line of the two loggers. To be called before the import.
    """
    for name, drop in (("torchao", _keep_unless_missing_kernel), ("torch.utils._pytree", _keep_unless_enum_constant)):
        logger = logging.getLogger(name)
        if drop not in logger.filters:
            logger.addFilter(drop)


def _keep_unless_missing_kernel(record: logging.LogRecord) -> bool:
    """False, which drops the record, for a library of torchao's that does not load."""
    said = record.getMessage()
    return not (said.startswith("Failed to load ") and "torchao" in said and ".so" in said)


def _keep_unless_enum_constant(record: logging.LogRecord) -> bool:
    """False, which drops the record, for torch's word on the two enums that torchao registers."""
    said = record.getMessage()
    ours = "KernelPreference" in said or "ScaleCalculationMode" in said
    return not (ours and "register_constant() on Enum" in said)


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
