"""Where other tools' samples are, as `data.source` names them: all three load with the package `datasets`."""

import os
from typing import Any

from recipe_lib.config.local_files import is_data
from recipe_lib.config.other_configs.conversion import ConfigImport
from recipe_lib.config.paths import expand
from recipe_lib.config.schema_data import HUB

# What `load_dataset` takes in place of a name, with the files in data_files.
LOADERS = ("json", "csv", "parquet", "text")
TEMPLATE = (
    "the tokenizer's own chat template is used; tokenizer.chat_template takes a Jinja file, `tune data show` the text"
)
NOT_HELD_OUT = (
    "no part of a file, of several datasets or of a part of one is held out: all samples are trained on and nothing is "
    "validated; validation.source takes a file of samples"
)


def find_source(conversion: ConfigImport, key: str, *, subset: Any = None, files: Any = None) -> str | None:
    """What `data.source` is for a dataset's name, path or loader; None after a fault was noted.

    subset: of a dataset of the hub. files: `data_files`, of a loader.
    """
    name = str(conversion.value(key))
    if "://" in name:
        conversion.refuse(key, "storage by URL is not read; copy the files here", may_be_left_out=False)
        return None
    if name in LOADERS:
        found = files if isinstance(files, list) else [] if files is None else [files]
        if len(found) != 1:
            conversion.refuse(key, f"{len(found)} data_files, expected one file or folder", may_be_left_out=False)
            return None
        return str(found[0])
    if is_local(name):
        return name
    return f"{HUB}{name}:{subset}" if subset else f"{HUB}{name}"


def is_local(name: str) -> bool:
    """Whether it names a file or folder: one that is there, or what no dataset on the hub is called."""
    path = expand(name)
    return os.path.exists(path) or is_data(path) or name.startswith(("/", "./", "../", "~"))


def carry_split(conversion: ConfigImport, key: str, section: str, source: str | None) -> None:
    """The split of a dataset of the hub; files have none."""
    split = str(conversion.value(key))
    if source is None or source.startswith(HUB):
        conversion.carry(key, {f"{section}.split": split})
    elif split == "train":
        conversion.drop(key, "files are read whole")
    else:
        conversion.refuse(key, "files are read whole, without splits; write the part into a file of its own")


def hold_out(conversion: ConfigImport, key: str) -> None:
    """A share of the training samples for validation, or a number of them: the last ones of a dataset of the hub."""
    size, ours = conversion.value(key), conversion.ours
    if not size:
        conversion.drop(key, "is off, as here")
        return
    if "validation.source" in (*ours, *conversion.given):
        conversion.drop(key, "validation.source has the samples")
        return
    source, split = ours.get("data.source"), ours.get("data.split", "train")
    most, percent = ours.get("data.max_samples"), round(float(size) * 100, 6)
    if source is None or not str(source).startswith(HUB) or "[" in split:
        conversion.drop(key, NOT_HELD_OUT)
        return
    if most is not None:
        trained = most - (int(size) if size >= 1 else round(most * size))
        parts = {"data.max_samples": trained, "validation.split": f"{split}[{trained}:{most}]"}
    elif size >= 1:
        count = int(size)
        parts = {"data.split": f"{split}[:-{count}]", "validation.split": f"{split}[-{count}:]"}
    elif percent == int(percent):
        left = 100 - int(percent)
        parts = {"data.split": f"{split}[:{left}%]", "validation.split": f"{split}[{left}%:]"}
    else:
        conversion.drop(key, "splits are in whole percents: all samples are trained on and nothing is validated")
        return
    how = "there drawn at random, here the last samples of those that are used"
    conversion.change(key, {"validation.source": source, **parts}, how)
