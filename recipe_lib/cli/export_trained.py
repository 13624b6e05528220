"""`tune export` of an adapter, a merged model, or the model of a run: what CHECKPOINT is, what is
written, and a check.

The run, state or adapter that a folder is, its base, and what goes into the export; imported with
torch.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe_lib.checkpoint.adapter_config import read_adapter_config
from recipe_lib.checkpoint.adapter_export import compute_file_rank, export_adapter
from recipe_lib.checkpoint.adapter_files import (
    BASE_DTYPE,
    BASE_IMPLEMENTATION,
    BASE_STORAGE,
    check_base,
    check_fits,
    read_adapter,
)
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.huggingface import check_weights, find_adapter_base, find_checkpoint
from recipe_lib.checkpoint.model_card import get_public_name, make_model_card
from recipe_lib.checkpoint.model_export import export_model
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.resumable_state import find_state, has_adapters, load_state
from recipe_lib.checkpoint.run_files import (
    find_best_state,
    parse_step,
    read_record,
    read_state_json,
)
from recipe_lib.checkpoint.tensor_matching import log_left_out
from recipe_lib.checkpoint.tokenizer_export import CHAT_TEMPLATE, TOKENIZER_FILES
from recipe_lib.checkpoint.verify import (
    Comparison,
    check_with_peft,
    check_with_transformers,
    compare_logits,
    compute_prompt_logits,
    load_model,
    load_model_with_adapter,
    make_adapter_settings,
)
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.config.local_files import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    BEST_FOLDER,
    MODEL_FOLDER,
    STATE_FOLDER,
    resolve_base_name,
)
from recipe_lib.config.schema import LoraConfig
from recipe_lib.config.suggest import show
from recipe_lib.data import find_trained_template
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.generation.source import DTYPE_NAMES, choose_device, choose_dtype
from recipe_lib.logs import print_wrapped
from recipe_lib.models import (
    Decoder,
    build_meta,
    read_config,
    read_preset_config,
    read_trained_spec,
)
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import ModelSpec
from recipe_lib.parallel import DTYPES
from recipe_lib.reading import find_object
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training.export_model import run_card
from recipe_lib.training.metrics import SUMMARY_FILE
from recipe_lib.training.next_commands import (
    ANYWHERE,
    adapter_commands,
    merge_command,
    model_commands,
    print_next,
)
from recipe_lib.units import GIB

CONFIG = "config.yaml"


@dataclass(frozen=True)
class ExportSource:
    """What CHECKPOINT is. run: the output_dir it is in, cfg: the config of the run that made it,
    records: the folder with that and its metrics; adapter or state: one of the two.
    """

    run: Path | None
    cfg: Any
    records: Path | None
    adapter: Path | None
    state: Path | None


def find_run(name: str) -> Path | None:
    """Return the output_dir of the run that wrote a folder: itself, or the one that its model/ or
    adapter/ is in.
    """
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    if (
        folder.absolute().name in (MODEL_FOLDER, ADAPTER_FOLDER)
        and (folder.absolute().parent / CONFIG).is_file()
    ):
        return folder.absolute().parent
    return None


def load_run_config(folder: Path, recipe: str | None) -> Any:
    """Return the config of the run that a folder is of. recipe: that it was made with; None: the
    one that it names.
    """
    path = folder / CONFIG
    return load_config(path, [], find_config_recipe(str(path), recipe).schema())


def find_export(arguments: argparse.Namespace) -> ExportSource:
    """Look at the folder; a state is verified byte by byte. Raises CheckpointError, ConfigError."""
    path, shown = Path(arguments.checkpoint).expanduser(), show(arguments.checkpoint)
    if not path.is_dir():
        raise CheckpointError(
            f"{shown}: no such folder; expected a run's output_dir, a state/step_N, or an adapter"
        )
    if (path / ADAPTER_CONFIG).is_file():
        return ExportSource(
            *_load_run_records(path.parent, arguments, path.name == ADAPTER_FOLDER),
            adapter=path,
            state=None,
        )
    if (path / "manifest.json").is_file():
        is_best = path.absolute().parent.name == BEST_FOLDER
        folder, cfg, records = _load_run_records(
            path.parent.parent.parent if is_best else path.parent.parent, arguments
        )
        if cfg is None:
            raise CheckpointError(
                f"{shown}: {CONFIG} of its run is missing; expected the state inside its output_dir"
            )
        return ExportSource(
            folder, cfg, records, None, find_state(path.parent, str(path), SingleRank())
        )
    folder, cfg, records = _load_run_records(path, arguments)
    is_model = (path / "config.json").is_file()
    if folder is None:
        what = "is a model folder already" if is_model else "is no run, state or adapter"
        raise CheckpointError(
            f"{shown}: {what}; expected a run's output_dir, a state/step_N, or an adapter's folder"
        )
    adapter = path / ADAPTER_FOLDER
    has_adapter = (adapter / ADAPTER_CONFIG).is_file()
    if has_adapter and not arguments.hf:
        folder, cfg, records = _load_run_records(path, arguments, adapter=True)
        saved = {
            file.stat().st_mtime: file.parent
            for file in path.glob(f"{STATE_FOLDER}/step_*/manifest.json")
        }
        if (
            saved and max(saved) > (adapter / ADAPTER_CONFIG).stat().st_mtime
        ):  # the run was gone on with, and not ended
            print_wrapped(
                f"note: {saved[max(saved)]} is newer than {adapter}, which is taken; name the state"
                " to export it"
            )
        return ExportSource(folder, cfg, records, adapter, None)
    state = _find_state_of_run(path / STATE_FOLDER, cfg) if (path / STATE_FOLDER).is_dir() else None
    if state is None:
        what = (
            "holds neither an adapter nor a state; run it again, with checkpoint.save_every_n_steps"
            " to have states"
        )
        if (path / MODEL_FOLDER / "config.json").is_file():
            what = (
                f"has no state to export; {path / MODEL_FOLDER} is its trained model, exported"
                " already"
            )
        elif has_adapter:
            what = "is a run of adapters; --hf is for runs that trained all weights, use --merge"
        raise CheckpointError(f"{shown}: {what}")
    return ExportSource(folder, cfg, records, None, state)


def _load_run_records(
    folder: Path, arguments: argparse.Namespace, adapter: bool = False
) -> tuple[Path | None, Any, Path | None]:
    """The run's folder, its config and where that is, if the folder is a run's."""
    records = folder
    record = read_record(folder) if adapter else None
    if (
        record is not None and ADAPTER_FOLDER in record.earlier and record.kept
    ):  # a run that replaces it is under way
        records = folder / record.kept[0]
        print_wrapped(
            f"note: {folder / ADAPTER_FOLDER} is of the run before the one in {folder}; see"
            f" {records}"
        )
    if not (records / CONFIG).is_file():
        return None, None, None
    return folder, load_run_config(records, arguments.recipe), records


def _find_state_of_run(root: Path, cfg: Any) -> Path | None:
    """Of a run that keeps its best step the weights of that, as the newest state has it; else the
    newest state.
    """
    best = find_best_state(root) if cfg.checkpoint.keep_best else None
    if best is None:
        return find_state(root, "latest", SingleRank())
    newer = [path.parent for path in root.glob("best/step_*/manifest.json") if path.parent != best]
    newer = [path for path in newer if path.stat().st_mtime > best.stat().st_mtime]
    print_wrapped(f"note: {best} is the best step of the run, and is taken")
    for path in newer:
        print_wrapped(f"note: {path} is newer, of steps after the last state; name it to export it")
    return find_state(best.parent, str(best), SingleRank())


def get_implementation(found: ExportSource) -> str | None:
    """Of the run's model, or what the adapter says of its base; None: see `read_trained_spec`."""
    if found.cfg is not None:
        return str(found.cfg.model.implementation)
    return (
        None
        if found.adapter is None
        else read_adapter(found.adapter).metadata.get(BASE_IMPLEMENTATION)
    )


def build_export_arguments(
    found: ExportSource, base: Path | None, spec: ModelSpec, is_adapter: bool
) -> dict[str, Any]:
    """Arguments of an export: the tokenizer's files, the template and stop tokens that the run
    used, and the card.
    """
    if found.cfg is None:
        return _build_arguments_without_run(found, base, spec, is_adapter)
    cfg, run = found.cfg, found.records
    folder = Path(cfg.tokenizer.path or base or find_checkpoint(cfg.model.path))
    tokenizer = load_tokenizer(folder, cfg.tokenizer.chat_template)
    template = find_trained_template(cfg, tokenizer)
    if found.state:
        step: int | None = parse_step(found.state)
        extra = read_state_json(found.state)["extra"]
        is_best = found.state.absolute().parent.name == BEST_FOLDER
        exported = f"best step {step}: {extra['metric']} {extra['value']:.4f}" if is_best else None
    else:
        summary = find_object(run / SUMMARY_FILE) if run else {}  # a run that was killed has none
        step = summary.get("exported_step")
        exported = summary.get("outcome")
    shown = get_public_name(cfg.model.path, base) if cfg.model.path else cfg.model.preset
    commands = _list_commands(
        spec, shown, cfg.trained_adapters if is_adapter else None, template is not None
    )
    return {
        "tokenizer_folder": folder,
        "chat_template": template,
        "stop_ids": tokenizer.stop_ids,
        "card": (
            run_card(
                cfg, base, commands, is_adapter=is_adapter, run=run, step=step, exported=exported
            )
            if run
            else None
        ),
    }


def _build_arguments_without_run(
    found: ExportSource, base: Path | None, spec: ModelSpec, is_adapter: bool
) -> dict[str, Any]:
    """Of an adapter without its run: the tokenizer that lies beside it is the one it was trained
    with.
    """
    assert found.adapter is not None
    held = read_adapter(found.adapter)
    assert base is not None
    lora, named = make_adapter_settings(held, spec), resolve_base_name(held.config.base, base)
    own = any((found.adapter / name).is_file() for name in TOKENIZER_FILES)
    shown, template = get_public_name(named, base), (found.adapter / CHAT_TEMPLATE).is_file()
    commands = _list_commands(spec, shown, lora if is_adapter else None, template)
    card = make_model_card(
        None, base=named, base_folder=base, lora=lora, is_adapter=is_adapter, commands=commands
    )
    return {"tokenizer_folder": found.adapter if own else base, "card": card}


def _list_commands(
    spec: ModelSpec, base: str, adapter: LoraConfig | None, template: bool
) -> list[str]:
    """Return what the card says to do with a model, or with an adapter on its base."""
    if adapter is None:
        return model_commands(ANYWHERE)
    return adapter_commands(
        ANYWHERE, base, adapter, rank=compute_file_rank(spec, adapter), template=template
    )


def find_base(found: ExportSource, arguments: argparse.Namespace) -> Path:
    """The folder of an adapter's base: the one that --base, its run or the adapter itself names.
    CheckpointError.
    """
    if arguments.base:
        return find_checkpoint(arguments.base)
    # The adapter's own name of it is found from any folder, the config's may be a path from where
    # the run was started.
    name = "" if found.adapter is None else read_adapter_config(found.adapter).base
    if found.cfg is not None and not name:
        model = found.cfg.model
        return find_adapter_base(
            arguments.checkpoint, model.path or str(model.preset), is_preset=not model.path
        )
    if not name:
        raise CheckpointError(
            f"{show(arguments.checkpoint)}: adapter_config.json names no base; give it with --base"
        )
    return find_adapter_base(arguments.checkpoint, name)


def write_merged(
    found: ExportSource,
    base: Path,
    adapter: Path,
    out: Path,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    """The adapter merged into its base, as the folder `out`. dtype: of the base while the adapter
    was trained.

    CheckpointError, StorageError; then there is no folder.
    """
    implementation = get_implementation(found)
    merge_adapter(
        base,
        adapter,
        out,
        quantize=read_adapter(adapter).metadata.get(BASE_STORAGE, "none"),
        dtype=dtype,
        out_dtype=out_dtype,
        ranks=SingleRank(),
        implementation=implementation,
        **build_export_arguments(
            found,
            base,
            read_trained_spec(read_config(base), str(base), implementation),
            is_adapter=False,
        ),
    )


def _choose_target(found: ExportSource, kind: str, arguments: argparse.Namespace) -> Path:
    """Where to write; a folder that is there is not touched."""
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif found.state is not None and found.run is not None:
        out = found.run / f"{kind}_{found.state.name}"
    else:
        assert found.adapter is not None
        out = (
            found.run / kind
            if found.run
            else found.adapter.with_name(f"{found.adapter.absolute().name}-{kind}")
        )
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists; choose another folder with --out, or remove it")
    return out


def export_hf(found: ExportSource, arguments: argparse.Namespace) -> None:
    """The model of a state of full fine-tuning."""
    if found.state is None or has_adapters(found.state):
        raise CheckpointError(
            f"{show(arguments.checkpoint)}: holds an adapter; use --merge or --adapter"
        )
    cfg, out = found.cfg, _choose_target(found, "model", arguments)
    device = choose_device(arguments.device)
    base = find_checkpoint(cfg.model.path) if cfg.model.path else None
    config = read_config(base) if base else read_preset_config(cfg.model.preset)
    spec = read_trained_spec(config, cfg.model.path or cfg.model.preset, cfg.model.implementation)
    dtype = DTYPES[cfg.dtype]
    model = build_meta(spec, dtype)
    allocate(model, device)
    model.eval()
    load_state(found.state, model, None, SingleRank())
    sizes = int(cfg.checkpoint.max_shard_gib * GIB)
    beside = build_export_arguments(found, base, spec, is_adapter=False)
    export_model(model, spec, config, out, max_shard_bytes=sizes, world=SingleRank(), **beside)
    if base:
        log_left_out(spec, base, "export")
    trained = compute_prompt_logits(model)
    del model
    report_comparison(
        f"model: {out}",
        compare_logits(trained, compute_prompt_logits(load_model(spec, out, dtype, device))),
        dtype,
        out,
    )
    print_wrapped(check_with_transformers(out, spec, dtype, device, trained))
    print_next(model_commands(out))


def export_adapted(found: ExportSource, arguments: argparse.Namespace) -> None:
    """The adapter of a folder or of a state, alone or merged into its base."""
    if found.state is not None and not has_adapters(found.state):
        raise CheckpointError(f"{found.state}: is of a run that trained all weights; use --hf")
    base = find_base(found, arguments)
    config = read_config(base)
    spec = read_trained_spec(config, str(base), get_implementation(found))
    check_weights(spec, base)
    device = choose_device(arguments.device)
    rewrite = found.state is not None or (arguments.adapter and arguments.out)
    out = None
    if arguments.merge:
        out = _choose_target(found, "model", arguments)
    elif rewrite:
        out = _choose_target(found, "adapter", arguments)
    if (
        rewrite
        and found.adapter is not None
        and (parts := check_fits(read_adapter(found.adapter), spec).parts)
    ):
        raise CheckpointError(
            f"{found.adapter}: brings {min(parts)} of its base along, which --adapter would not"
            " write; copy the folder as it is, or merge it (--merge)"
        )
    model, dtype = _load_trained_model(found, spec, base, config, device)
    trained = (compute_prompt_logits(model), compute_prompt_logits(model, with_adapters=False))
    with tempfile.TemporaryDirectory(prefix="tune-export-") as scratch:
        adapter = found.adapter or Path(scratch) / "adapter"
        if rewrite:
            adapter = out if arguments.adapter and out else adapter
            _write_adapter(model, spec, found, base, config, adapter)
        del model
        if arguments.merge and out:
            _check_merged(found, arguments, base, adapter, out, dtype, device, trained)
        else:
            _check_adapter(found, base, spec, adapter, dtype, device, trained)
            _print_next_commands(found, arguments, spec, adapter)


def _load_trained_model(
    found: ExportSource, spec: ModelSpec, base: Path, config: dict[str, Any], device: torch.device
) -> tuple[Decoder, torch.dtype]:
    """The model as it was trained: base, adapter, types and storage. And the type of its base."""
    if found.state is not None:
        dtype = DTYPES[found.cfg.dtype]
        model = load_model(spec, base, dtype, device, found.cfg.lora)
        load_state(found.state, model, None, SingleRank())
        return model, dtype
    assert found.adapter is not None
    adapter = read_adapter(found.adapter)
    check_fits(adapter, spec)
    check_base(adapter, spec, base)
    dtype = choose_dtype(DTYPE_NAMES.get(adapter.metadata.get(BASE_DTYPE, ""), "auto"), config)
    return load_model_with_adapter(found.adapter, spec, base, dtype, device)[0], dtype


def _write_adapter(
    model: Decoder,
    spec: ModelSpec,
    found: ExportSource,
    base: Path,
    config: dict[str, Any],
    out: Path,
) -> None:
    if found.state is not None:
        lora, name = found.cfg.lora, str(found.cfg.model.path)
    else:
        assert found.adapter is not None
        adapter = read_adapter(found.adapter)
        lora, name = make_adapter_settings(adapter, spec), adapter.config.base
    export_adapter(
        model,
        spec,
        lora,
        out,
        base=resolve_base_name(name, base),
        base_folder=base,
        source_config=config,
        world=SingleRank(),
        **build_export_arguments(found, base, spec, is_adapter=True),
    )


def _check_adapter(
    found: ExportSource,
    base: Path,
    spec: ModelSpec,
    adapter: Path,
    dtype: torch.dtype,
    device: torch.device,
    trained: tuple[torch.Tensor, torch.Tensor],
) -> None:
    model, filled = load_model_with_adapter(adapter, spec, base, dtype, device)
    held = read_adapter(adapter)
    print_wrapped(
        f"check: {filled} modules have their adapter, none of {len(held.tensors)} in the file is"
        " left over"
    )
    if held.config.dora:
        print_wrapped(
            "note: vLLM does not load DoRA adapters; serve the merged model there (tune export"
            " --merge)"
        )
    logits = compute_prompt_logits(model)
    del model  # PEFT's comes in its place
    report_comparison(
        f"adapter: {adapter}", compare_logits(trained[0], logits, trained[1]), dtype, adapter
    )
    print_wrapped(check_with_peft(adapter, base, spec, dtype, device, trained))


def _print_next_commands(
    found: ExportSource, arguments: argparse.Namespace, spec: ModelSpec, adapter: Path
) -> None:
    """The commands that go on from an adapter, each of which works with its folder as it is."""
    held = read_adapter(adapter)
    if held.extras:  # which neither vLLM nor PEFT knows
        return
    lora, base = make_adapter_settings(held, spec), arguments.base or held.config.base
    template = (adapter / CHAT_TEMPLATE).is_file()
    given = bool(arguments.base) and os.path.abspath(arguments.base) != held.config.base
    commands = adapter_commands(
        adapter, base, lora, rank=lora.rank, with_base=given, template=template
    )
    # vLLM loads A and B alone: what else the file has of the base it would leave out or refuse.
    print_next(commands[:1] if check_fits(held, spec).parts else commands)
    is_of_run = (
        found.run is not None and adapter.parent == found.run
    )  # where a merged model would be the run's
    if not (is_of_run and (adapter.parent / "model").exists()):
        print_next([merge_command(adapter, arguments.base, arguments.recipe)])


def _check_merged(
    found: ExportSource,
    arguments: argparse.Namespace,
    base: Path,
    adapter: Path,
    out: Path,
    dtype: torch.dtype,
    device: torch.device,
    trained: tuple[torch.Tensor, torch.Tensor],
) -> None:
    held = read_adapter(adapter)
    wanted = DTYPES[arguments.dtype] if arguments.dtype else dtype
    write_merged(found, base, adapter, out, dtype, wanted)
    spec = read_trained_spec(read_config(out), str(out), get_implementation(found))
    print_wrapped(
        f"check: {len(held.tensors)} adapted modules are merged, every tensor of the model is there"
    )
    comparison = compare_logits(
        trained[0], compute_prompt_logits(load_model(spec, out, wanted, device)), trained[1]
    )
    coarser = min(dtype, wanted, key=lambda kind: kind.itemsize)
    report_comparison(f"model: {out}", comparison, coarser, out)
    print_wrapped(check_with_transformers(out, spec, coarser, device, *trained))
    if comparison.change and comparison.difference > comparison.change / 2:
        print_wrapped(
            "note: rounding hides what the adapter has learned; try --dtype fp32, or serve base and"
            " adapter apart"
        )
    print_next(model_commands(out))


def report_comparison(written: str, comparison: Comparison, dtype: torch.dtype, out: Path) -> None:
    """Prints what was written and how it compares; CheckpointError if it differs by more than
    rounding.
    """
    print_wrapped(written)
    if not comparison.is_within_rounding(dtype):
        raise CheckpointError(
            f"{out}: does not compute what was trained: {comparison}; do not use it, and report"
            " this"
        )
    print_wrapped(f"check: {comparison}, read with tune")
