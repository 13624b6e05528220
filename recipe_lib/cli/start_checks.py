"""Check what would stop a run before its first step, as far as config, files and ranks tell it.

`tune validate`, `tune plan` and `tune run` call `check_start` before torch is imported, and
`check_model`, which alone imports it; `tune data` calls `check_data`. A check raises what the run
would raise later, or returns a note: a line on a file that may still come before the run.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from recipe_lib.config.key_conditions import is_hub
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
from recipe_lib.config.schema_data import list_sources_by_section
from recipe_lib.errors import CheckpointError, ConfigError, UserError, raise_faults


def check_start(
    cfg: Any, *, ranks: int | None = None, starts: bool = False, plans: bool = False
) -> list[str]:
    """Return notes on what must be there before the run and is not, such as a model to download.

    ranks: of the run; None: not known. starts: the run starts now, so that each note is a fault.
    plans: only a plan is made, perhaps for another machine; what only a run needs is a note. Raises
    ConfigError with all faults, a line each.
    """
    checks: list[Callable[[], Any]] = [
        # A plan may be made next to the results of an earlier run.
        partial(check_folder, Path(cfg.output_dir)) if plans else partial(_check_output, cfg),
        partial(_check_model, cfg, with_weights=not plans),
        *(
            partial(_check_other_model, cfg, key, with_weights=not plans)
            for key in cfg.other_models  # dotted keys, such as that of a teacher
        ),
        partial(_check_adapter, cfg),
        partial(_check_resume, cfg),
        *(partial(check_tracker, name) for name in dict.fromkeys(cfg.log.trackers)),
    ]
    if ranks is not None:
        checks.append(partial(compute_mesh_shape, cfg.parallel, ranks))
    sources: list[Callable[[], Any]] = [
        partial(check_source, source, key) for key, source in _list_sources(cfg).items()
    ]
    if plans:
        checks_of_run: list[Callable[[], Any]] = [
            partial(check_earlier_run, cfg),
            partial(_check_text, cfg),
            *sources,
        ]
        # Another machine may have what is missing here: these faults are notes.
        lines = _run_checks(checks) + [
            (f"`tune run` refuses to start on this machine: {line}", False)
            for line, is_fault in _run_checks(checks_of_run)
            if is_fault
        ]
    else:
        checks += [partial(_check_text, cfg), partial(_check_own_tokenizer, cfg), *sources]
        lines = _run_checks(checks)
    # The same line may come from two keys that name one file.
    raise_faults(ConfigError, dict.fromkeys(line for line, is_fault in lines if is_fault or starts))
    return list(dict.fromkeys(line for line, _ in lines))


def check_data(cfg: Any) -> None:
    """Check that the samples and a tokenizer are there, which `tune data` needs.

    Raises ConfigError with all faults, a line each; notes are faults here.
    """
    checks = [partial(check_source, source, key) for key, source in _list_sources(cfg).items()]
    lines = _run_checks([*checks, partial(_check_tokenizer_of_model, cfg)])
    raise_faults(ConfigError, dict.fromkeys(line for line, _ in lines))


def _run_checks(checks: Iterable[Callable[[], Any]]) -> list[tuple[str, bool]]:
    """Call all checks; return (line, is a fault) of each fault raised and each note returned."""
    lines: list[tuple[str, bool]] = []
    for check in checks:
        try:
            note = check()
        except UserError as error:
            lines += [(fault, True) for fault in error.faults]
            continue
        # Functions of other modules may return a path or a shape, which is no note.
        if note and isinstance(note, str):
            lines.append((note, False))
    return lines


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


def _list_sources(cfg: Any) -> dict[str, str]:
    sources: dict[str, str] = {}
    sources_by_key = {
        f"{section}.source": data_source.source
        for section, data_source in list_sources_by_section(cfg.data).items()
    }
    for key, source in (sources_by_key | {"validation.source": cfg.validation.source}).items():
        # A dataset of the hub may be named by several keys; it is looked for once.
        if source and not (is_hub(source) and source in sources.values()):
            sources[key] = source
    return sources


def _check_model(cfg: Any, with_weights: bool) -> str | None:
    """Check the model's folder, config.json and weights, and that a native one's family is known.

    Returns a note for a model that is still to come.
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
    """Check a further checkpoint of the recipe, such as a teacher's, as `_check_model` does.

    key: the config's dotted key that names it, put in front of each line.
    """
    from recipe_lib.models import build_spec

    section, _, field = key.partition(".")
    name = getattr(getattr(cfg, section), field)
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
    return _describe_missing_file(name, lambda: find_weights(folder)) if with_weights else None


def _check_adapter(cfg: Any) -> str | None:
    adapter = cfg.trained_adapters and cfg.trained_adapters.adapter_path
    if not adapter:
        return None
    if _is_made_by_a_run(adapter, ADAPTER_FOLDER):
        return (
            f"{adapter}: no such folder; expected the adapter that a run with"
            f" output_dir={Path(adapter).parent} leaves there"
        )
    check_adapter(Path(adapter))
    return None


def _is_made_by_a_run(name: str, kind: str) -> bool:
    # kind: the folder's name, `model` or `adapter`. Two parts would be a hub id, OWNER/model.
    path = Path(name).expanduser()
    return path.name == kind and len(path.parts) > 2 and not os.path.exists(path)


def _check_resume(cfg: Any) -> None:
    if cfg.resume and cfg.resume != "latest" and not os.path.isdir(cfg.resume):
        raise CheckpointError(describe_damaged_state(cfg.resume, "no such folder"))


def _check_text(cfg: Any) -> None:
    if cfg.tokenizer.path:
        find_tokenizer(Path(cfg.tokenizer.path))
    if cfg.tokenizer.chat_template:
        check_template(Path(cfg.tokenizer.chat_template))


def _check_own_tokenizer(cfg: Any) -> str | None:
    name = cfg.model.path
    if not name or cfg.tokenizer.path or _is_made_by_a_run(name, MODEL_FOLDER):
        return None
    try:
        folder = find_model_folder(name) or find_downloaded_model(name)
    except CheckpointError:  # `_check_checkpoint` raises it
        return None
    # `_check_checkpoint` says that there is no model.
    if folder is None or not os.path.isfile(folder / "config.json"):
        return None
    return _describe_missing_file(name, partial(find_tokenizer, folder))


def _describe_missing_file(name: str, look: Callable[[], Any]) -> str | None:
    """Return what `look` raises about a model in the hub's cache, as a note; None: nothing.

    name: model.path. Of a folder it raises the error itself: nothing is downloaded into it.
    """
    try:
        look()
    except UserError as error:
        if find_model_folder(name) is not None:
            raise
        # Of a model in the hub's cache more files may be downloaded before the run.
        return str(error)
    return None


def check_model(cfg: Any, *, starts: bool = False) -> None:
    """Check the model as the run will: its files' tensors, and what the config has it do.

    Does nothing for a model that is not on this disk. starts: the run starts now; else the weights
    of a model in the hub's cache are not looked at, as more files may be downloaded before the run.
    Raises ConfigError, CheckpointError or SetupError as the run would.
    """
    from recipe_lib.checkpoint.model_folders import has_weights

    name = cfg.model.path
    local = Path(name).expanduser() if name else None
    is_local = local is not None and local.is_dir()
    folder = local if is_local else find_downloaded_model(name) if name else None
    is_here = folder is not None and has_weights(folder)
    if is_here or count_same_batch_ranks(cfg.parallel) > 1:
        # Imports torch, which takes seconds.
        from recipe_lib.training.resolve_model import check_local_model

        reads_weights = is_here and (starts or is_local)
        check_local_model(cfg, folder, reads_weights=reads_weights)
