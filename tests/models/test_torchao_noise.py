"""What importing torchao prints about kernels nobody asked for is dropped, and nothing else of the
same loggers.
"""

import logging

import pytest

from recipe_lib.logs import silence_torchao

NOISE = {
    "torchao": (
        (
            "Failed to load /site-packages/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could"
            " not load this library"
        ),
        "Failed to load /site-packages/torchao/_C_cutlass_90a.abi3.so: Could not load this library",
    ),
    "torch.utils._pytree": tuple(
        f"<enum '{name}'> is an Enum subclass and is now natively supported by torch.compile as an"
        " opaque value type. Calling register_constant() on Enum subclasses is deprecated and will"
        " be an error in a future release."
        for name in ("KernelPreference", "ScaleCalculationMode")
    ),
}
OTHERS = {
    "torchao": (
        "Skipping import of cpp extensions due to incompatible torch version",
        "Failed to load weights",
    ),
    "torch.utils._pytree": (
        "<enum 'Mine'> is an Enum subclass. Calling register_constant() on Enum subclasses is ...",
    ),
}


def test_four_lines_are_dropped_and_no_others(caplog: pytest.LogCaptureFixture):
    silence_torchao()
    silence_torchao()
    for lines in (NOISE, OTHERS):
        for name, texts in lines.items():
            logger = logging.getLogger(name)
            logger.addHandler(caplog.handler)
            caplog.set_level(logging.WARNING, logger=name)  # a plan made before may have raised it
            try:
                for text in texts:
                    logger.warning(text)
            finally:
                logger.removeHandler(caplog.handler)
            assert len(logger.filters) == 1
    said = [record.getMessage() for record in caplog.records]
    assert set(said) == {text for texts in OTHERS.values() for text in texts}
