"""Set up every test: one thread, no network, no caches or receipts of the user; fresh loggers.

One thread makes runs repeatable and shares cores fairly. A receipt is the record of a run's planned
and measured memory. `realdata` is the folder of real tokenizers and models.
"""

import gc
import logging
import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TUNE_PLAN", "off")  # no process beside each run that a test starts
os.environ.setdefault("TUNE_RECEIPTS", "off")  # no plan of a test quotes the runs of this machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a network

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from recipe_lib.config import registry  # noqa: E402
from recipe_lib.data.tokenize_dataset import has_dead_groups  # noqa: E402
from recipe_lib.logs import VERBOSITY_VARIABLE  # noqa: E402

torch.set_num_threads(1)
# pytest-xdist sets it to the width of its own terminal; the tested programs have no terminal.
os.environ.pop("COLUMNS", None)
# Garbage of this process (process groups with threads) must not be collected in a fork, which would
# wait for the threads. So collect before a fork, and freeze in it before anything can collect.
os.register_at_fork(before=lambda: has_dead_groups() and gc.collect(), after_in_child=gc.freeze)


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay, out of collections: they take a second or two each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def realdata() -> Path:
    """Return the folder of real tokenizers, layouts and small weights; skip without it.

    The environment variable REALDATA_DIR names it.
    """
    folder = os.environ.get("REALDATA_DIR")
    if not folder:
        pytest.skip(
            "REALDATA_DIR is not set: it names the folder of real tokenizers, layouts and weights"
        )
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"REALDATA_DIR={folder}: no such folder")
    return path


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cache tokenized rows in a folder of these tests, not in the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def fresh_logger() -> Iterator[None]:
    """Drop the logger after a test.

    A logger keeps the rank and the verbosity that the environment had when it was built.
    """
    yield
    # A command that ran in this process has set it for the processes that it starts.
    os.environ.pop(VERBOSITY_VARIABLE, None)
    logging.getLogger("tune").handlers.clear()


@pytest.fixture(autouse=True)
def no_plugin_left() -> Iterator[None]:
    """Remove after a test what its plugins (a user's files) have registered; what ships stays."""
    yield
    for kind, components in registry._components.items():
        for name in set(components) - set(registry.BUILT_IN[kind][1]):
            del components[name]
    registry._loaded.clear()
