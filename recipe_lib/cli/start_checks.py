"""What would stop a run before its first step, as far as config, names of files and numbers of ranks tell it.

The same checks, in the words of the code that would find it later, for `tune validate`, `tune plan` and `tune run`,
before torch is imported. Whether a model fits the ranks that share it, its shape says; that alone imports torch.
"""

import os
from collections.abc import Callable, Iterator
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
    downloaded_model,
    find_tokenizer,
    model_folder,
    no_whole_state,
    not_downloaded,
)
from recipe_lib.config.mesh import mesh_shape, same_batch_ranks
from recipe_lib.config.schema_data import is_hub, sources_by_section
from recipe_lib.errors import CheckpointError, ConfigError, UserError


def check_start(cfg: Any, *, ranks: int | None = None, starts: bool = False, plans: bool = False) -> list[str]:
    """Notes on what has to be there before the run, if it is not: a model to download, or one that another run makes.

    ranks: of the run, None: not known. starts: the run starts now, and what would be a note is a fault. plans: only a
    plan is made, perhaps for another machine: it does without what rows and kernels need, and an earlier run in
    output_dir is a note. Raises ConfigError with all faults, a line each.
    """
    notes: list[str] = []
    faults: list[str] = []

    def check(look: Callable[[], str | None]) -> None:
        try:
            note = look()
        except UserError as error:
            faults.extend(error.faults)
            return
        if note:
            (faults if starts else notes).append(note)

    folder = Path(cfg.output_dir)
    check(lambda: check_folder(folder))
    if not faults:
        check(lambda: _note_earlier_run(cfg) if plans else check_earlier_run(cfg))
    check(lambda: _check_model(cfg, with_weights=not plans))
    for key in cfg.other_models:
        check(lambda key=key: _check_other_model(cfg, key, with_weights=not plans))  # type: ignore[misc]
    check(lambda: _check_adapter(cfg))
    check(lambda: _check_resume(cfg))
    for name in dict.fromkeys(cfg.log.trackers):
        check(lambda name=name: check_tracker(name))  # type: ignore[misc]
    if ranks is not None:
        check(lambda: _check_ranks(cfg, ranks))
    if plans:
        notes.extend(_missing_on_this_machine(cfg))
    else:
        check(lambda: _check_text(cfg))
        check(lambda: _check_own_tokenizer(cfg))
        for key, source in _sources(cfg).items():
            check(lambda key=key, source=source: check_source(source, key))  # type: ignore[misc]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return list(dict.fromkeys(notes))


def check_data(cfg: Any) -> None:
    """What looking at samples needs: the samples, and a tokenizer. Raises ConfigError with all faults, a line each."""
    faults: list[str] = []
    name, needs_model = cfg.model.path, cfg.tokenizer.path is None
    for key, source in _sources(cfg).items():
        try:
            faults += [note] if (note := check_source(source, key)) else []
        except UserError as error:
            faults.extend(error.faults)
    try:
        if needs_model and name and model_folder(name) is None and downloaded_model(name) is None:
            files = " ".join(f"'{pattern}'" for pattern in TOKENIZER_PATTERNS)
            faults.append(
                f"{name}: no such folder, and not in the hub cache; its tokenizer is enough to look at samples: "
                f"`tune download {name} --include {files}`"
            )
    except UserError as error:
        faults.extend(error.faults)
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def _note_earlier_run(cfg: Any) -> str | None:
    try:
        check_earlier_run(cfg)
    except ConfigError as error:
        return f"`tune run` refuses to start on this machine: {error}"
    return None


def _sources(cfg: Any) -> dict[str, str]:
    """The sources of samples by the keys that name them; a dataset of the hub once."""
    found: dict[str, str] = {}
    named = {f"{section}.source": one.source for section, one in sources_by_section(cfg.data).items()}
    for key, source in (named | {"validation.source": cfg.validation.source}).items():
        if source and not (is_hub(source) and source in found.values()):
            found[key] = source
    return found


def _missing_on_this_machine(cfg: Any) -> Iterator[str]:
    """Why a run would not start here, in the notes of a plan; the plan does without samples and tokenizer."""
    looks: list[Callable[[], Any]] = [lambda: _check_text(cfg)]
    for key, source in _sources(cfg).items():
        looks.append(lambda key=key, source=source: check_source(source, key))  # type: ignore[misc]
    for look in looks:
        try:
            look()
        except UserError as error:
            yield from (f"`tune run` refuses to start on this machine: {fault}" for fault in error.faults)


def _check_model(cfg: Any, with_weights: bool) -> str | None:
    """Its folder and config.json, and the files of its weights; a native one is of a family that is known."""
    from recipe_lib.models import preset_config
    from recipe_lib.models.families import spec_of_run

    if cfg.model.implementation == "transformers":
        check_transformers()
    name = cfg.model.path
    if not name:
        if cfg.model.implementation == "native" and cfg.model.preset:
            spec_of_run(cfg, preset_config(cfg.model.preset), cfg.model.preset)
        return None
    read_spec = partial(spec_of_run, cfg) if cfg.model.implementation == "native" else None
    return _check_checkpoint(name, read_spec, with_weights)


def _check_other_model(cfg: Any, key: str, with_weights: bool) -> str | None:
    """A further checkpoint of the recipe, by the key that names it; in the words of `_check_model`."""
    from recipe_lib.models import spec_from_config

    section, _, word = key.partition(".")
    name = getattr(getattr(cfg, section), word)
    try:
        note = _check_checkpoint(name, spec_from_config, with_weights) if name else None
    except UserError as error:
        raise ConfigError(*(f"{key}: {fault}" for fault in error.faults)) from error
    return f"{key}: {note}" if note else None


def _check_checkpoint(
    name: str, read_spec: Callable[[dict[str, Any], str], Any] | None, with_weights: bool
) -> str | None:
    from recipe_lib.checkpoint.weight_files import find_weights
    from recipe_lib.models import read_config

    if _is_made_by_a_run(name, MODEL_FOLDER):
        return f"{name}: no such folder; expected the model that a run with output_dir={Path(name).parent} leaves there"
    folder = model_folder(name) or downloaded_model(name)
    if folder is None:
        return not_downloaded(name)
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
        return f"{adapter}: no such folder; expected the adapter that a run with output_dir={made} leaves there"
    check_adapter(Path(adapter))
    return None


def _is_made_by_a_run(name: str, kind: str) -> bool:
    path = Path(name).expanduser()
    return path.name == kind and len(path.parts) > 2 and not os.path.exists(path)


def _check_resume(cfg: Any) -> None:
    if cfg.resume and cfg.resume != "latest" and not os.path.isdir(cfg.resume):
        raise CheckpointError(no_whole_state(cfg.resume, "no such folder"))


def _check_ranks(cfg: Any, ranks: int) -> None:
    mesh_shape(cfg.parallel, ranks)


def _check_text(cfg: Any) -> None:
    """The tokenizer and its template."""
    if cfg.tokenizer.path:
        find_tokenizer(Path(cfg.tokenizer.path))
    if cfg.tokenizer.chat_template:
        check_template(Path(cfg.tokenizer.chat_template))


def _check_own_tokenizer(cfg: Any) -> str | None:
    """That of the model's folder, where no other is set; a note for a model of the hub, of which more may come."""
    name = cfg.model.path
    if not name or cfg.tokenizer.path or _is_made_by_a_run(name, MODEL_FOLDER):
        return None
    folder = _folder_with_config(name)
    return _as_note(name, lambda: find_tokenizer(folder)) if folder else None


def _folder_with_config(name: str) -> Path | None:
    """The folder of a model on this machine, if it is one; what is wrong with others is told elsewhere."""
    try:
        folder = model_folder(name) or downloaded_model(name)
    except CheckpointError:
        return None
    return folder if folder and os.path.isfile(folder / "config.json") else None


def _as_note(name: str, look: Callable[[], Any]) -> str | None:
    """What `look` finds to be missing of a model: a fault of a folder; of a model of the hub a note."""
    try:
        look()
    except UserError as error:
        if model_folder(name) is not None:
            raise
        return str(error)
    return None


def check_shape(cfg: Any) -> None:
    """Whether the ranks of `parallel.tensor`, `context` and `pipeline` can share the model, if its shape is known."""
    if same_batch_ranks(cfg.parallel) > 1:
        from recipe_lib.training.resolve_model import (
            validate_parallelism_if_local,  # imports torch, which takes seconds
        )

        validate_parallelism_if_local(cfg)
