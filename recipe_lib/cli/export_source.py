"""What `tune export` exports: the run, state or adapter that a folder is, its base, and what goes into the export."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.config.local_files import BEST_FOLDER, base_name
from recipe_lib.config.schema import LoraConfig
from recipe_lib.config.suggest import show
from recipe_lib.errors import CheckpointError
from recipe_lib.logs import print_wrapped
from recipe_lib.reading import find_object

if TYPE_CHECKING:
    import torch

    from recipe_lib.models.spec import ModelSpec

CONFIG, STATES = "config.yaml", "state"


@dataclass(frozen=True)
class ExportSource:
    """What CHECKPOINT is. run: the output_dir it is in, cfg: the config of the run that made it, records: the folder
    with that and its metrics; adapter or state: one of the two."""

    run: Path | None
    cfg: Any
    records: Path | None
    adapter: Path | None
    state: Path | None


def find_export(arguments: argparse.Namespace) -> ExportSource:
    """Looks at the folder; a state is verified byte by byte. CheckpointError, ConfigError."""
    path, shown = Path(arguments.checkpoint).expanduser(), show(arguments.checkpoint)
    if not path.is_dir():
        raise CheckpointError(f"{shown}: no such folder; expected a run's output_dir, a state/step_N, or an adapter")
    if (path / "adapter_config.json").is_file():
        return ExportSource(*_run_at(path.parent, arguments, path.name == "adapter"), adapter=path, state=None)
    if (path / "manifest.json").is_file():
        is_best = path.absolute().parent.name == BEST_FOLDER
        folder, cfg, records = _run_at(path.parent.parent.parent if is_best else path.parent.parent, arguments)
        if cfg is None:
            raise CheckpointError(f"{shown}: {CONFIG} of its run is missing; expected the state inside its output_dir")
        return ExportSource(folder, cfg, records, None, _state(path.parent, str(path)))
    folder, cfg, records = _run_at(path, arguments)
    if folder is None:
        what = "is a model folder already" if (path / "config.json").is_file() else "is no run, state or adapter"
        raise CheckpointError(f"{shown}: {what}; expected a run's output_dir, a state/step_N, or an adapter's folder")
    if not arguments.hf and (path / "adapter" / "adapter_config.json").is_file():
        folder, cfg, records = _run_at(path, arguments, adapter=True)
        _tell_of_newer_state(path / STATES, path / "adapter" / "adapter_config.json")
        return ExportSource(folder, cfg, records, path / "adapter", None)
    state = _state_of_run(path / STATES, cfg) if (path / STATES).is_dir() else None
    if state is None:
        raise CheckpointError(f"{shown}: {_what_is_there(path)}")
    return ExportSource(folder, cfg, records, None, state)


def _what_is_there(run: Path) -> str:
    """Of a run without states, why it cannot be exported, and what to do."""
    if (run / "model" / "config.json").is_file():
        return f"has no state to export; {run / 'model'} is its trained model, exported already"
    if (run / "adapter" / "adapter_config.json").is_file():
        return "is a run of adapters; --hf is for runs that trained all weights, use --merge"
    return "holds neither an adapter nor a state; run it again, with checkpoint.save_every_n_steps to have states"


def _tell_of_newer_state(states: Path, adapter: Path) -> None:
    """Of a run that had ended, was gone on with and has not ended again, the adapter is older than the states."""
    saved = {path.stat().st_mtime: path.parent for path in states.glob("step_*/manifest.json")}
    if saved and max(saved) > adapter.stat().st_mtime:
        print_wrapped(
            f"note: {saved[max(saved)]} is newer than {adapter.parent}, which is taken; name the state to export it"
        )


def _owner(folder: Path) -> Path:
    """Where the config of the run is that made `folder/adapter`: a run that replaces it may be under way."""
    from recipe_lib.checkpoint.run_files import read_record

    record = read_record(folder)
    if record is None or "adapter" not in record.earlier or not record.kept:
        return folder
    print_wrapped(f"note: {folder / 'adapter'} is of the run before the one in {folder}; see {folder / record.kept[0]}")
    return folder / record.kept[0]


def _run_at(folder: Path, arguments: argparse.Namespace, adapter: bool = False) -> tuple[Path | None, Any, Path | None]:
    """The run's folder, its config and where that is, if the folder is a run's."""
    config = (_owner(folder) if adapter else folder) / CONFIG
    if not config.is_file():
        return None, None, None
    from recipe_lib.cli.recipes import recipe_for
    from recipe_lib.config import load_config

    cfg = load_config(config, [], recipe_for(str(config), arguments.recipe).schema())
    return folder, cfg, config.parent


def _state(root: Path, which: str) -> Path | None:
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.state import find_state

    return find_state(root, which, SingleRank())


def _state_of_run(root: Path, cfg: Any) -> Path | None:
    """Of a run that keeps its best step the weights of that, as the newest state has it; else the newest state."""
    from recipe_lib.checkpoint.run_files import best_state

    best = best_state(root) if cfg.checkpoint.keep_best else None
    if best is None:
        return _state(root, "latest")
    newer = [path.parent for path in root.glob("best/step_*/manifest.json") if path.parent != best]
    newer = [path for path in newer if path.stat().st_mtime > best.stat().st_mtime]
    print_wrapped(f"note: {best} is the best step of the run, and is taken")
    for path in newer:
        print_wrapped(f"note: {path} is newer, of steps after the last state; name it to export it")
    return _state(best.parent, str(best))


def implementation_of(found: ExportSource) -> str | None:
    """Of the run's model, or what the adapter says of its base; None: see `read_trained_spec`."""
    from recipe_lib.checkpoint.adapter_files import BASE_IMPLEMENTATION, read_adapter

    if found.cfg is not None:
        return str(found.cfg.model.implementation)
    return None if found.adapter is None else read_adapter(found.adapter).metadata.get(BASE_IMPLEMENTATION)


def find_base(name: str) -> Path:
    """The folder of the model that a run began from, or an adapter is for. CheckpointError."""
    from recipe_lib.checkpoint.huggingface import find_checkpoint

    return find_checkpoint(name)


def beside_weights(found: ExportSource, base: Path | None, spec: "ModelSpec", is_adapter: bool) -> dict[str, Any]:
    """Arguments of an export: the tokenizer's files, the template and stop tokens that the run used, and the card."""
    if found.cfg is None:
        return _beside_strange_adapter(found, base, spec, is_adapter)
    from recipe_lib.checkpoint.model_card import public_name
    from recipe_lib.data import trained_template
    from recipe_lib.tokenizers import load_tokenizer
    from recipe_lib.training.export_model import run_card

    cfg, run = found.cfg, found.records
    folder = Path(cfg.tokenizer.path or base or find_base(cfg.model.path))
    tokenizer = load_tokenizer(folder, cfg.tokenizer.chat_template)
    template = trained_template(cfg, tokenizer)
    step, exported = _exported_step(found.state) if found.state else _exported_by_run(run)
    shown = public_name(cfg.model.path, base) if cfg.model.path else cfg.model.preset
    commands = _commands(spec, shown, cfg.trained_adapters if is_adapter else None, template is not None)
    return {
        "tokenizer_folder": folder,
        "chat_template": template,
        "stop_ids": tokenizer.stop_ids,
        "card": run_card(cfg, base, commands, is_adapter=is_adapter, run=run, step=step, exported=exported)
        if run
        else None,
    }


def _exported_step(state: Path) -> tuple[int, str | None]:
    """The step of a state and, if it holds the weights of a best one, by which number."""
    from recipe_lib.checkpoint.run_files import read_state_json, step_of

    extra = read_state_json(state)["extra"]
    is_best = state.absolute().parent.name == BEST_FOLDER
    return step_of(state), f"best step {step_of(state)}: {extra['metric']} {extra['value']:.4f}" if is_best else None


def _exported_by_run(records: Path | None) -> tuple[int | None, str | None]:
    """The step of the adapter that a run has exported, where it looked for a best one; by its summary."""
    from recipe_lib.training.metrics import SUMMARY_FILE

    summary = find_object(records / SUMMARY_FILE) if records else {}  # a run that was killed has none
    return summary.get("exported_step"), summary.get("outcome")


def _beside_strange_adapter(
    found: ExportSource, base: Path | None, spec: "ModelSpec", is_adapter: bool
) -> dict[str, Any]:
    """Of an adapter without its run: the tokenizer that lies beside it is the one it was trained with."""
    from recipe_lib.checkpoint.adapter_files import read_adapter
    from recipe_lib.checkpoint.model_card import model_card, public_name
    from recipe_lib.checkpoint.tokenizer_out import CHAT_TEMPLATE, TOKENIZER_FILES
    from recipe_lib.checkpoint.verify import adapter_settings_of

    assert found.adapter is not None
    held = read_adapter(found.adapter)
    assert base is not None
    lora, named = adapter_settings_of(held, spec), base_name(held.config.base, base)
    own = any((found.adapter / name).is_file() for name in TOKENIZER_FILES)
    shown, template = public_name(named, base), (found.adapter / CHAT_TEMPLATE).is_file()
    commands = _commands(spec, shown, lora if is_adapter else None, template)
    card = model_card(None, base=named, base_folder=base, lora=lora, is_adapter=is_adapter, commands=commands)
    return {"tokenizer_folder": found.adapter if own else base, "card": card}


def _commands(spec: "ModelSpec", base: str, adapter: LoraConfig | None, template: bool) -> list[str]:
    """What the card says to do with a model, or with an adapter on its base."""
    from recipe_lib.checkpoint.adapter_out import file_rank
    from recipe_lib.training.next_commands import ANYWHERE, adapter_commands, model_commands

    if adapter is None:
        return model_commands(ANYWHERE)
    return adapter_commands(ANYWHERE, base, adapter, rank=file_rank(spec, adapter), template=template)


def base_of(found: ExportSource, arguments: argparse.Namespace) -> Path:
    """The folder of an adapter's base: the one that --base, its run or the adapter itself names. CheckpointError."""
    if arguments.base:
        return find_base(arguments.base)
    from recipe_lib.checkpoint.adapter_config import read_adapter_config
    from recipe_lib.checkpoint.huggingface import find_adapter_base

    # The adapter's own name of it is found from any folder, the config's may be a path from where the run was started.
    name = "" if found.adapter is None else read_adapter_config(found.adapter).base
    if found.cfg is not None and not name:
        model = found.cfg.model
        return find_adapter_base(arguments.checkpoint, model.path or str(model.preset), is_preset=not model.path)
    if not name:
        raise CheckpointError(f"{show(arguments.checkpoint)}: adapter_config.json names no base; give it with --base")
    return find_adapter_base(arguments.checkpoint, name)


def write_merged(
    found: ExportSource, base: Path, adapter: Path, out: Path, dtype: "torch.dtype", out_dtype: "torch.dtype"
) -> None:
    """The adapter merged into its base, as the folder `out`. dtype: of the base while the adapter was trained.

    CheckpointError, StorageError; then there is no folder."""
    from recipe_lib.checkpoint.adapter_files import BASE_STORAGE, read_adapter
    from recipe_lib.checkpoint.merged import merge_adapter
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.models import read_config, read_trained_spec

    implementation = implementation_of(found)
    merge_adapter(
        base,
        adapter,
        out,
        quantize=read_adapter(adapter).metadata.get(BASE_STORAGE, "none"),
        dtype=dtype,
        out_dtype=out_dtype,
        ranks=SingleRank(),
        implementation=implementation,
        **beside_weights(
            found, base, read_trained_spec(read_config(base), str(base), implementation), is_adapter=False
        ),
    )
