"""What would stop a run before its first step, as far as config, names of files and numbers of
ranks tell it.

The same checks, in the words of the code that would find it later, for `tune validate`, `tune plan`
and `tune run`, before torch is imported. Whether a model fits the ranks that share it, its shape
says; that alone imports torch.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from recipe_lib.config.local_files import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    TOKENIZER_PATTERNS,
    check_adapter,
    check_earlier_run,
    check_folder,
    check_source,
    check_template,
    check_tracker,
    check_transformers,
    describe_damaged_state,
    describe_missing_model,
    find_downloaded_model,
    find_model_folder,
    find_tokenizer,
)
from recipe_lib.config.mesh import compute_mesh_shape, count_same_batch_ranks
from recipe_lib.config.schema_data import is_hub, list_sources_by_section
from recipe_lib.errors import CheckpointError, ConfigError, UserError, raise_faults


def check_start(
    cfg: Any, *, ranks: int | None = None, starts: bool = False, plans: bool = False
) -> list[str]:
    """Return notes on what has to be there before the run, if it is not: a model to download, or
    that of another run.

    ranks: of the run, None: not known. starts: the run starts now, and what would be a note is a
    fault. plans: only a plan is made, perhaps for another machine: it does without what rows and
    kernels need, which is a note. Raises ConfigError with all faults, a line each.
    """
    looks: list[Callable[[], Any]] = [
        partial(check_folder, Path(cfg.output_dir)) if plans else partial(_check_output, cfg),
        partial(_check_model, cfg, with_weights=not plans),
        *(
            partial(_check_other_model, cfg, key, with_weights=not plans)
            for key in cfg.other_models
        ),
        partial(_check_adapter, cfg),
        partial(_check_resume, cfg),
        *(partial(check_tracker, name) for name in dict.fromkeys(cfg.log.trackers)),
    ]
    if ranks is not None:
        looks.append(partial(compute_mesh_shape, cfg.parallel, ranks))
    sources = [partial(check_source, source, key) for key, source in _sources(cfg).items()]
    if plans:
        found = _look(looks)
        why = [
            line
            for line, is_fault in _look(
                [partial(check_earlier_run, cfg), partial(_check_text, cfg), *sources]
            )
            if is_fault
        ]
        found += [(f"`tune run` refuses to start on this machine: {line}", False) for line in why]
    else:
        found = _look(
            [*looks, partial(_check_text, cfg), partial(_check_own_tokenizer, cfg), *sources]
        )
    raise_faults(ConfigError, dict.fromkeys(line for line, is_fault in found if is_fault or starts))
    return list(dict.fromkeys(line for line, _ in found))


def check_data(cfg: Any) -> None:
    """Check what looking at samples needs: the samples, and a tokenizer. Raises ConfigError, a line
    for each fault.
    """
    looks = [partial(check_source, source, key) for key, source in _sources(cfg).items()]
    found = _look([*looks, partial(_check_tokenizer_of_model, cfg)])
    raise_faults(ConfigError, dict.fromkeys(line for line, _ in found))


def _look(looks: Iterable[Callable[[], Any]]) -> list[tuple[str, bool]]:
    """Return the lines of all that is missing, and whether it is a fault: raised by a look, or a
    note that it gives.
    """
    found: list[tuple[str, bool]] = []
    for look in looks:
        try:
            note = look()
        except UserError as error:
            found += [(fault, True) for fault in error.faults]
            continue
        if note and isinstance(note, str):
            found.append((note, False))
    return found


def _check_output(cfg: Any) -> None:
    check_folder(Path(cfg.output_dir))
    check_earlier_run(cfg)


def _check_tokenizer_of_model(cfg: Any) -> str | None:
    name = cfg.model.path
    if (
        cfg.tokenizer.path is not None
        or not name
        or find_model_folder(name)
        or find_downloaded_model(name)
    ):
        return None
    files = " ".join(f"'{pattern}'" for pattern in TOKENIZER_PATTERNS)
    return (
        f"{name}: no such folder, and not in the hub cache; its tokenizer is enough to look at"
        f" samples: `tune download {name} --include {files}`"
    )


def _sources(cfg: Any) -> dict[str, str]:
    """The sources of samples by the keys that name them; a dataset of the hub once."""
    found: dict[str, str] = {}
    named = {
        f"{section}.source": one.source
        for section, one in list_sources_by_section(cfg.data).items()
    }
    for key, source in (named | {"validation.source": cfg.validation.source}).items():
        if source and not (is_hub(source) and source in found.values()):
            found[key] = source
    return found


def _check_model(cfg: Any, with_weights: bool) -> str | None:
    """Its folder and config.json, and the files of its weights; a native one is of a family that is
    known.
    """
    from recipe_lib.models import read_preset_config
    from recipe_lib.models.families import read_run_spec

    if cfg.model.implementation == "transformers":
        check_transformers()
    name = cfg.model.path
    if not name:
        if cfg.model.implementation == "native" and cfg.model.preset:
            read_run_spec(cfg, read_preset_config(cfg.model.preset), cfg.model.preset)
        return None
    read_spec = partial(read_run_spec, cfg) if cfg.model.implementation == "native" else None
    return _check_checkpoint(name, read_spec, with_weights)


def _check_other_model(cfg: Any, key: str, with_weights: bool) -> str | None:
    """A further checkpoint of the recipe, by the key that names it; in the words of
    `_check_model`.
    """
    from recipe_lib.models import build_spec

    section, _, word = key.partition(".")
    name = getattr(getattr(cfg, section), word)
    try:
        note = _check_checkpoint(name, build_spec, with_weights) if name else None
    except UserError as error:
        raise ConfigError(*(f"{key}: {fault}" for fault in error.faults)) from error
    return f"{key}: {note}" if note else None


def _check_checkpoint(
    name: str, read_spec: Callable[[dict[str, Any], str], Any] | None, with_weights: bool
) -> str | None:
    from recipe_lib.checkpoint.model_folders import find_weights
    from recipe_lib.models import read_config

    if _is_made_by_a_run(name, MODEL_FOLDER):
        return (
            f"{name}: no such folder; expected the model that a run with"
            f" output_dir={Path(name).parent} leaves there"
        )
    folder = find_model_folder(name) or find_downloaded_model(name)
    if folder is None:
        return describe_missing_model(name)
    config = read_config(folder)
    if read_spec is not None:
        read_spec(config, str(folder))
    return _as_note(name, lambda: find_weights(folder)) if with_weights else None


def _check_adapter(cfg: Any) -> str | None:
    adapter = cfg.trained_adapters and cfg.trained_adapters.adapter_path
    if not adapter:
        return None
    if _is_made_by_a_run(adapter, ADAPTER_FOLDER):
        made = Path(adapter).parent
        return (
            f"{adapter}: no such folder; expected the adapter that a run with output_dir={made}"
            " leaves there"
        )
    check_adapter(Path(adapter))
    return None


def _is_made_by_a_run(name: str, kind: str) -> bool:
    path = Path(name).expanduser()
    return path.name == kind and len(path.parts) > 2 and not os.path.exists(path)


def _check_resume(cfg: Any) -> None:
    if cfg.resume and cfg.resume != "latest" and not os.path.isdir(cfg.resume):
        raise CheckpointError(describe_damaged_state(cfg.resume, "no such folder"))


def _check_text(cfg: Any) -> None:
    """The tokenizer and its template."""
    if cfg.tokenizer.path:
        find_tokenizer(Path(cfg.tokenizer.path))
    if cfg.tokenizer.chat_template:
        check_template(Path(cfg.tokenizer.chat_template))


def _check_own_tokenizer(cfg: Any) -> str | None:
    """That of the model's folder, where no other is set; a note for a model of the hub, of which
    more may come.
    """
    name = cfg.model.path
    if not name or cfg.tokenizer.path or _is_made_by_a_run(name, MODEL_FOLDER):
        return None
    try:
        folder = find_model_folder(name) or find_downloaded_model(name)
    except CheckpointError:  # told elsewhere
        return None
    if folder is None or not os.path.isfile(folder / "config.json"):
        return None
    return _as_note(name, partial(find_tokenizer, folder))


def _as_note(name: str, look: Callable[[], Any]) -> str | None:
    """What `look` finds to be missing of a model: a fault of a folder; of a model of the hub a
    note.
    """
    try:
        look()
    except UserError as error:
        if find_model_folder(name) is not None:
            raise
        return str(error)
    return None


def check_shape(cfg: Any) -> None:
    """Whether the ranks of `parallel.tensor`, `context` and `pipeline` can share the model, if its
    shape is known.
    """
    if count_same_batch_ranks(cfg.parallel) > 1:
        from recipe_lib.training.resolve_model import (
            validate_parallelism_if_local,  # imports torch, which takes seconds
        )

        validate_parallelism_if_local(cfg)
