"""Export trained weights for `tune export`: an adapter, an adapter merged into its base, a model.

cli/export.py calls `export_source.find_export_source` for what CHECKPOINT names, then `export_hf`
(all weights) or `export_adapted`, which load what they wrote and compare its logits with the
trained model's. `arguments` is the parsed command line.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from recipe_lib.checkpoint.adapter_files import (
    BASE_DTYPE,
    BASE_STORAGE,
    check_base,
    check_fits,
    read_adapter,
)
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.export_shards import find_carried
from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint
from recipe_lib.checkpoint.model_export import export_model
from recipe_lib.checkpoint.open_exports import (
    Comparison,
    check_with_peft,
    check_with_transformers,
    compare_logits,
    compute_prompt_logits,
    load_model,
    load_model_with_adapter,
    make_adapter_settings,
)
from recipe_lib.checkpoint.peft_folders import compute_file_rank, export_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.checkpoint.resumable_state import has_adapters, load_state
from recipe_lib.checkpoint.run_files import (
    parse_step,
    read_state_json,
)
from recipe_lib.checkpoint.side_files import (
    CHAT_TEMPLATE,
    TOKENIZER_FILES,
    get_public_name,
    make_model_card,
)
from recipe_lib.checkpoint.tensor_matching import log_left_out
from recipe_lib.cli.export_source import ExportSource, find_base, get_implementation
from recipe_lib.config import LoraConfig
from recipe_lib.config.local_files import (
    BEST_FOLDER,
    resolve_base_name,
)
from recipe_lib.config.suggest import show
from recipe_lib.data import find_trained_template
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.generation.source import DTYPE_NAMES, choose_device, choose_dtype
from recipe_lib.logs import print_wrapped
from recipe_lib.models import (
    Decoder,
    ModelSpec,
    allocate,
    build_meta,
    read_config,
    read_preset_config,
    read_trained_spec,
)
from recipe_lib.parallel import DTYPES
from recipe_lib.reading import find_object
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training.export_model import (
    ANYWHERE,
    find_unserved_parts,
    format_merge_command,
    list_adapter_commands,
    list_model_commands,
    make_run_card,
    print_next_commands,
)
from recipe_lib.training.records import SUMMARY_FILE
from recipe_lib.units import GIB


def build_export_arguments(
    source: ExportSource, base: Path | None, spec: ModelSpec, is_adapter: bool
) -> dict[str, Any]:
    """Return keyword arguments of `export_model`, `export_adapter` and `merge_adapter`.

    They are `tokenizer_folder`, `chat_template`, `stop_ids` and `card`, the text of the model card.
    base: folder of the base; None: training began from random weights. spec: of the base.
    is_adapter: an adapter is exported, not a full model.
    """
    if source.cfg is None:
        return _build_arguments_without_run(source, base=base, spec=spec, is_adapter=is_adapter)
    cfg = source.cfg
    tokenizer_folder = Path(cfg.tokenizer.path or base or find_checkpoint(cfg.model.path))
    tokenizer = load_tokenizer(tokenizer_folder, cfg.tokenizer.chat_template)
    template = find_trained_template(cfg, tokenizer)
    if source.state:
        step: int | None = parse_step(source.state)
        extra = read_state_json(source.state)["extra"]  # of a best state: its metric and value
        is_best = source.state.absolute().parent.name == BEST_FOLDER
        exported = f"best step {step}: {extra['metric']} {extra['value']:.4f}" if is_best else None
    else:
        # A run that was killed has no summary.
        summary = find_object(source.records / SUMMARY_FILE) if source.records else {}
        step = summary.get("exported_step")
        exported = summary.get("outcome")  # a text on the choice of that step
    base_name = get_public_name(cfg.model.path, base) if cfg.model.path else cfg.model.preset
    adapter = cfg.trained_adapters if is_adapter else None
    commands = _list_commands(spec, base_name, adapter=adapter, template=template is not None)
    card = None
    if run := source.records:
        card = make_run_card(
            cfg, base, commands, is_adapter=is_adapter, run=run, step=step, exported=exported
        )
    return {
        "tokenizer_folder": tokenizer_folder,
        "chat_template": template,
        "stop_ids": tokenizer.stop_ids,
        "card": card,
    }


def _build_arguments_without_run(
    source: ExportSource, base: Path | None, spec: ModelSpec, is_adapter: bool
) -> dict[str, Any]:
    """Return the arguments `tokenizer_folder` and `card` for an adapter whose run is not known."""
    assert source.adapter is not None and base is not None
    adapter = read_adapter(source.adapter, spec)
    lora = make_adapter_settings(adapter, spec)
    base_name = resolve_base_name(adapter.config.base, base)
    commands = _list_commands(
        spec,
        get_public_name(base_name, base),
        adapter=lora if is_adapter else None,
        template=(source.adapter / CHAT_TEMPLATE).is_file(),
    )
    card = make_model_card(
        None, base=base_name, base_folder=base, lora=lora, is_adapter=is_adapter, commands=commands
    )
    # A tokenizer next to the adapter is the one that it was trained with.
    has_tokenizer = any((source.adapter / name).is_file() for name in TOKENIZER_FILES)
    return {"tokenizer_folder": source.adapter if has_tokenizer else base, "card": card}


def _list_commands(
    spec: ModelSpec, base: str, *, adapter: LoraConfig | None, template: bool
) -> list[str]:
    """Return the commands on the card: for a full model, or for an adapter on its base.

    base: its name on the card. adapter: settings of the adapter; None: a full model. template: the
    export has a chat template.
    """
    # ANYWHERE stands for the export's folder, which its user will move.
    if adapter is None:
        return list_model_commands(ANYWHERE)
    return list_adapter_commands(
        ANYWHERE,
        base,
        adapter,
        rank=compute_file_rank(spec, adapter),
        served=not any(part.is_refused for part in find_unserved_parts(spec, adapter)),
        template=template,
    )


def write_merged(
    source: ExportSource,
    *,
    base: Path,
    adapter: Path,
    out: Path,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    """Merge an adapter into its base, and write the model as the folder `out`.

    dtype: of the base in training. out_dtype: of the files. Raises CheckpointError if the adapter
    does not fit the base, and StorageError if `out` cannot be written; then there is no `out`.
    """
    implementation = get_implementation(source)
    spec = read_trained_spec(read_config(base), str(base), implementation)
    merge_adapter(
        base,
        adapter,
        out,
        quantize=read_adapter(adapter).metadata.get(BASE_STORAGE, "none"),
        dtype=dtype,
        out_dtype=out_dtype,
        ranks=SingleRank(),
        implementation=implementation,
        carries=source.cfg is None or source.cfg.checkpoint.carry,
        **build_export_arguments(source, base, spec, is_adapter=False),
    )


def _choose_target(source: ExportSource, kind: str, arguments: argparse.Namespace) -> Path:
    """Return the folder to write. Raises ConfigError if it exists.

    It is --out, else OUTPUT_DIR/KIND_step_N for a state, OUTPUT_DIR/KIND for a run's adapter, and
    ADAPTER-KIND next to an adapter without a run. kind: `model` or `adapter`.
    """
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif source.state is not None and source.run is not None:
        out = source.run / f"{kind}_{source.state.name}"
    elif source.run is not None:
        out = source.run / kind
    else:
        assert source.adapter is not None
        out = source.adapter.with_name(f"{source.adapter.absolute().name}-{kind}")
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists; choose another folder with --out, or remove it")
    return out


def export_hf(source: ExportSource, arguments: argparse.Namespace) -> None:
    """Export the full model of a state, open it again and compare its logits.

    Raises CheckpointError for an adapter, and for logits that differ by more than rounding.
    """
    if source.state is None or has_adapters(source.state):
        raise CheckpointError(
            f"{show(arguments.checkpoint)}: holds an adapter; use --merge or --adapter"
        )
    cfg = source.cfg
    out = _choose_target(source, "model", arguments)
    device = choose_device(arguments.device)
    base = find_checkpoint(cfg.model.path) if cfg.model.path else None
    config = read_config(base) if base else read_preset_config(cfg.model.preset)
    spec = read_trained_spec(config, cfg.model.path or cfg.model.preset, cfg.model.implementation)
    dtype = DTYPES[cfg.dtype]
    model = build_meta(spec, dtype)
    allocate(model, device)
    model.eval()
    load_state(source.state, model=model, optimizer=None, world=SingleRank())
    export_model(
        model,
        spec=spec,
        source_config=config,
        out=out,
        max_shard_bytes=int(cfg.checkpoint.max_shard_gib * GIB),
        world=SingleRank(),
        **build_export_arguments(source, base, spec, is_adapter=False),
        carried=find_carried(spec, base, carries=cfg.checkpoint.carry),
    )
    if base:
        log_left_out(spec, base, "export", carries=cfg.checkpoint.carry)
    expected = compute_prompt_logits(model)
    del model  # before the exported one is loaded: both may not fit
    # Another spec than that of the base if the text model alone was exported.
    spec = read_trained_spec(read_config(out), str(out), cfg.model.implementation)
    logits = compute_prompt_logits(load_model(spec, folder=out, dtype=dtype, device=device))
    report_comparison(f"model: {out}", compare_logits(expected, logits), dtype=dtype, out=out)
    print_wrapped(
        check_with_transformers(out, spec=spec, dtype=dtype, device=device, trained=expected)
    )
    print_next_commands(list_model_commands(out))


def export_adapted(source: ExportSource, arguments: argparse.Namespace) -> None:
    """Export an adapter or the adapter in a state, alone or merged, and compare its logits.

    Raises CheckpointError for a state with all weights, an adapter that --adapter cannot write, and
    logits of the export that differ by more than rounding.
    """
    if source.state is not None and not has_adapters(source.state):
        raise CheckpointError(f"{source.state}: is of a run that trained all weights; use --hf")
    base = find_base(source, arguments)
    config = read_config(base)
    spec = read_trained_spec(config, str(base), get_implementation(source))
    check_weights(spec, base)
    device = choose_device(arguments.device)
    # An adapter that is a folder already is only checked, unless --out asks for a copy.
    writes_adapter = source.state is not None or (arguments.adapter and arguments.out)
    out = None
    if arguments.merge:
        out = _choose_target(source, "model", arguments)
    elif writes_adapter:
        out = _choose_target(source, "adapter", arguments)
    # `parts`: parameters of the base that the adapter's file replaces (PEFT's modules_to_save).
    if (
        writes_adapter
        and source.adapter is not None
        and (parts := check_fits(read_adapter(source.adapter, spec), spec).parameters)
    ):
        raise CheckpointError(
            f"{source.adapter}: brings {min(parts)} of its base along, which --adapter would not"
            " write; copy the folder as it is, or merge it (--merge)"
        )
    model, dtype = _load_trained_model(source, spec, base=base, config=config, device=device)
    logits = (compute_prompt_logits(model), compute_prompt_logits(model, with_adapters=False))
    with tempfile.TemporaryDirectory(prefix="tune-export-") as scratch:
        # To be merged, the adapter of a state is written as a folder for a moment.
        adapter = source.adapter or Path(scratch) / "adapter"
        if writes_adapter:
            adapter = out if arguments.adapter and out else adapter
            _write_adapter(model, spec, source, base=base, config=config, out=adapter)
        del model  # before the exported one is loaded: both may not fit
        if arguments.merge and out:
            _merge_and_check(
                source,
                arguments,
                base=base,
                adapter=adapter,
                out=out,
                dtype=dtype,
                device=device,
                expected=logits,
            )
        else:
            _check_adapter(
                base=base, spec=spec, adapter=adapter, dtype=dtype, device=device, expected=logits
            )
            _print_next_commands(source, arguments, spec=spec, adapter=adapter)


def _load_trained_model(
    source: ExportSource, spec: ModelSpec, base: Path, config: dict[str, Any], device: torch.device
) -> tuple[Decoder, torch.dtype]:
    if source.state is not None:
        dtype = DTYPES[source.cfg.dtype]
        model = load_model(spec, folder=base, dtype=dtype, device=device, lora=source.cfg.lora)
        load_state(source.state, model=model, optimizer=None, world=SingleRank())
        return model, dtype
    assert source.adapter is not None
    adapter = read_adapter(source.adapter, spec)
    check_fits(adapter, spec)
    check_base(adapter, spec, base)
    dtype = choose_dtype(DTYPE_NAMES.get(adapter.metadata.get(BASE_DTYPE, ""), "auto"), config)
    return load_model_with_adapter(
        source.adapter, spec=spec, base=base, dtype=dtype, device=device
    )[0], dtype


def _write_adapter(
    model: Decoder,
    spec: ModelSpec,
    source: ExportSource,
    *,
    base: Path,
    config: dict[str, Any],
    out: Path,
) -> None:
    """Write the adapter of a model as the folder `out`. config: config.json of the base."""
    if source.state is not None:
        lora = source.cfg.lora
        base_name = str(source.cfg.model.path)
    else:
        assert source.adapter is not None
        adapter = read_adapter(source.adapter, spec)
        lora = make_adapter_settings(adapter, spec)
        base_name = adapter.config.base
    export_adapter(
        model,
        spec=spec,
        cfg=lora,
        out=out,
        base=resolve_base_name(base_name, base),
        base_folder=base,
        source_config=config,
        world=SingleRank(),
        **build_export_arguments(source, base, spec, is_adapter=True),
    )


def _check_adapter(
    *,
    base: Path,
    spec: ModelSpec,
    adapter: Path,
    dtype: torch.dtype,
    device: torch.device,
    expected: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Load an adapter again, by this library and by PEFT, and compare logits with the trained ones.

    adapter: its folder. dtype: of the base in training. expected: logits of the trained model,
    and of its base alone. Raises CheckpointError if logits differ by more than rounding.
    """
    model, filled = load_model_with_adapter(
        adapter, spec=spec, base=base, dtype=dtype, device=device
    )
    adapter_file = read_adapter(adapter, spec)
    print_wrapped(
        f"check: {filled} modules have their adapter, none of {len(adapter_file.tensors)} in the"
        " file is left over"
    )
    if adapter_file.config.dora:
        print_wrapped(
            "note: vLLM does not load DoRA adapters; serve the merged model there (tune export"
            " --merge)"
        )
    logits = compute_prompt_logits(model)
    del model  # before PEFT loads the base again
    comparison = compare_logits(expected[0], logits, expected[1])
    report_comparison(f"adapter: {adapter}", comparison, dtype=dtype, out=adapter)
    print_wrapped(
        check_with_peft(adapter, base, spec, dtype=dtype, device=device, trained=expected)
    )


def _print_next_commands(
    source: ExportSource, arguments: argparse.Namespace, *, spec: ModelSpec, adapter: Path
) -> None:
    adapter_file = read_adapter(adapter, spec)
    # `extras`: parameters that a recipe added, which vLLM and PEFT cannot load.
    if adapter_file.extras:
        return
    lora = make_adapter_settings(adapter_file, spec)
    base_name = adapter_file.config.base
    unserved = find_unserved_parts(spec, lora)
    for part in unserved:
        print_wrapped(f"note: {part.text}")
    commands = list_adapter_commands(
        adapter,
        arguments.base or base_name,
        lora,
        rank=lora.rank,
        served=not any(part.is_refused for part in unserved),
        with_base=bool(arguments.base) and os.path.abspath(arguments.base) != base_name,
        template=(adapter / CHAT_TEMPLATE).is_file(),
    )
    # The first is of `tune generate`, the other of vLLM, which loads only A and B: full weights in
    # the file it would ignore or refuse.
    print_next_commands(commands[:1] if check_fits(adapter_file, spec).parameters else commands)
    # For an adapter in a run's folder, --merge writes model/ of the run, which must not exist yet.
    is_of_run = source.run is not None and adapter.parent == source.run
    if not (is_of_run and (adapter.parent / "model").exists()):
        print_next_commands([format_merge_command(adapter, arguments.base, arguments.recipe)])


def _merge_and_check(
    source: ExportSource,
    arguments: argparse.Namespace,
    *,
    base: Path,
    adapter: Path,
    out: Path,
    dtype: torch.dtype,
    device: torch.device,
    expected: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Merge the adapter into its base, load the model again, compare as `_check_adapter` does."""
    num_adapted = len(read_adapter(adapter).tensors)
    out_dtype = DTYPES[arguments.dtype] if arguments.dtype else dtype
    write_merged(source, base=base, adapter=adapter, out=out, dtype=dtype, out_dtype=out_dtype)
    spec = read_trained_spec(read_config(out), str(out), get_implementation(source))
    print_wrapped(
        f"check: {num_adapted} adapted modules are merged, every tensor of the model is there"
    )
    merged = compute_prompt_logits(load_model(spec, folder=out, dtype=out_dtype, device=device))
    comparison = compare_logits(expected[0], merged, expected[1])
    # The tolerance is that of the coarser dtype (fewer bytes) of the two models.
    coarser = min(dtype, out_dtype, key=lambda kind: kind.itemsize)
    report_comparison(f"model: {out}", comparison, dtype=coarser, out=out)
    print_wrapped(check_with_transformers(out, spec, coarser, device, *expected))
    # `change`: the most by which the adapter changes a logit of the base.
    if comparison.change and comparison.difference > comparison.change / 2:
        print_wrapped(
            "note: rounding hides what the adapter has learned; try --dtype fp32, or serve base and"
            " adapter apart"
        )
    print_next_commands(list_model_commands(out))


def report_comparison(text: str, comparison: Comparison, *, dtype: torch.dtype, out: Path) -> None:
    """Print `text` and the comparison; raise CheckpointError if it exceeds the dtype's rounding."""
    print_wrapped(text)
    if not comparison.is_within_rounding(dtype):
        raise CheckpointError(
            f"{out}: does not compute what was trained: {comparison}; do not use it, and report"
            " this"
        )
    print_wrapped(f"check: {comparison}, read with tune")
