"""Merge a base model and an adapter into one Hugging Face folder.

`merge_adapter` is called by `tune export --merge` and at the end of a run with lora.merge_on_save.
It reads the files of both and writes those of the merged model, a part of a tensor at a time, each
rank files of its own. The base is merged as it was in training: in the dtype of the run and, if the
run quantized it, with the rounded values. "Collective": all ranks must call the function.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from recipe_lib.adapters.peft_names import (
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    HEAD,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    FileModule,
    MergedRows,
    get_target,
    unstack_expert_factors,
)
from recipe_lib.adapters.quantized import can_quantize, fake_quantize_weight
from recipe_lib.checkpoint.adapter_base_weights import SavedWeights
from recipe_lib.checkpoint.adapter_files import (
    AdapterFile,
    check_base,
    check_fits,
    read_adapter,
    read_score_keys,
)
from recipe_lib.checkpoint.export_shards import find_carried
from recipe_lib.checkpoint.huggingface import load_weights, make_unknown_extras_error
from recipe_lib.checkpoint.model_export import (
    SideFiles,
    export_config,
    export_model,
    write_model,
)
from recipe_lib.checkpoint.rank_groups import (
    RankGroup,
    SingleRank,
    run_on_all_ranks,
    run_on_rank_0,
)
from recipe_lib.checkpoint.safetensors_files import (
    DTYPES,
    PlannedTensor,
    Reader,
)
from recipe_lib.checkpoint.tensor_matching import check_weights, log_left_out, read_headers
from recipe_lib.errors import CheckpointError
from recipe_lib.models import (
    SCORE,
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    allocate,
    build_meta,
    build_scored_spec,
    read_config,
    read_trained_spec,
)
from recipe_lib.models.weight_names import build_weight_map, compute_parameter_shapes
from recipe_lib.ops.fused_kernels import cut_rows
from recipe_lib.units import GIB

_PIECE_ELEMENTS = 2**24  # elements of a weight that are merged at a time: 64 MiB in fp32


@dataclass(frozen=True)
class Update:
    """The adapter of a weight `[n, m]`: LoRA adds `scaling * lora_b @ lora_a` to it."""

    # LoRA's A, `[r, m]`.
    lora_a: Tensor
    # LoRA's B, `[n, r]`.
    lora_b: Tensor
    # Factor of the product B A: alpha / r, or alpha / sqrt(r) with rsLoRA.
    scaling: float
    # DoRA's magnitudes `[n]` of rows, or with `by_column` `[m]` of columns; None: LoRA.
    magnitudes: Tensor | None = None
    # True: magnitudes are of columns, as for an embedding, whose transposed weight PEFT adapts.
    by_column: bool = False

    def slice_rows(self, start: int, stop: int) -> "Update":
        """Return the update of rows `[start, stop)`; not for an update with `by_column`."""
        magnitudes = None if self.magnitudes is None else self.magnitudes[start:stop]
        return replace(self, lora_b=self.lora_b[start:stop], magnitudes=magnitudes)

    def add_to(self, rows: Tensor, start: int) -> Tensor:
        """Return rows of the weight with the LoRA update added, without DoRA's magnitudes.

        rows: `[rows, m]` of the weight, beginning with row `start`.
        """
        lora_b = self.lora_b[start : start + len(rows)].to(rows.dtype)
        return torch.addmm(rows, lora_b, self.lora_a.to(rows.dtype), alpha=self.scaling)


@torch.no_grad()
def merge_rows(
    read_rows: Callable[[int, int], Tensor], count: int, update: Update | None
) -> Iterator[Tensor]:
    """Yield the merged weight `[count, m]` in consecutive pieces of rows.

    It is computed in fp32, in fp64 for a weight of fp64.

    read_rows: function of (start, stop) that returns those rows of the weight. count: rows of the
    weight. update: None leaves the weight as it is.
    """
    column_factors = None
    if update is not None and update.by_column and update.magnitudes is not None:
        # The length of a column is known only when all rows have been read: once more for this.
        column_factors = _compute_column_factors(read_rows, count, update)
    for start, stop in _cut_pieces(read_rows, count):
        rows = _widen(read_rows(start, stop))
        if update is not None:
            rows = update.add_to(rows, start)
        if column_factors is not None:
            rows.mul_(column_factors)
        elif update is not None and update.magnitudes is not None:
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows.mul_(update.magnitudes[start:stop].to(rows.dtype).unsqueeze(1) / lengths)
        yield rows


def _compute_column_factors(
    read_rows: Callable[[int, int], Tensor], count: int, update: Update
) -> Tensor:
    """Return DoRA's factor of each column `[m]`: its magnitude over its length with the update."""
    squares = sum(
        update.add_to(_widen(read_rows(start, stop)), start).square_().sum(dim=0)
        for start, stop in _cut_pieces(read_rows, count)
    )
    assert isinstance(squares, Tensor) and update.magnitudes is not None
    return update.magnitudes.to(squares.dtype) / squares.sqrt_()


def _widen(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _cut_pieces(read_rows: Callable[[int, int], Tensor], count: int) -> list[tuple[int, int]]:
    width = read_rows(0, 1).shape[1] if count else 1
    return cut_rows(count, width, _PIECE_ELEMENTS)


def merge_adapter(
    base_folder: Path,
    adapter_folder: Path,
    out: Path,
    *,
    quantize: str,
    dtype: torch.dtype,
    ranks: RankGroup,
    implementation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tokenizer_folder: Path | None = None,
    chat_template: str | Path | None = None,
    stop_ids: Collection[int] = (),
    max_shard_bytes: int = 4 * GIB,
    card: str | None = None,
    carries: bool = True,
) -> None:
    """Write the folder `out`: the base with the adapter added, computed in fp32. Collective.

    A tied model whose embedding or head is adapted is no longer tied in `out`. Each rank writes
    some of the files, to a disk that all ranks share; a model of another library is merged by rank
    0, in host memory.

    Args:
        base_folder, adapter_folder, out: of the base, of the adapter and of the merged model.
        quantize: lora.quantize_base (`none`, `nf4`, `int8`) of the run that trained the adapter.
        dtype: of the base in that run.
        ranks: all ranks.
        implementation: of the base, see `read_trained_spec`.
        out_dtype: of the files; None: `dtype`.
        tokenizer_folder, chat_template, stop_ids, max_shard_bytes, card: as for `export_model`;
            without a tokenizer's folder it is the base's.
        carries: True: what the base's folder has besides the text model is in `out`, unchanged.

    Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    adapter, spec, saved = run_on_all_ranks(
        ranks, lambda: _read_checked(base_folder, adapter_folder, implementation)
    )
    run_on_rank_0(ranks, lambda: log_left_out(spec, base_folder, topic="export", carries=carries))
    file_dtype = out_dtype or dtype
    side_files = SideFiles(
        tokenizer_folder or base_folder,
        chat_template=chat_template,
        stop_ids=stop_ids,
        card=card,
        carried=find_carried(spec, base_folder, carries=carries),
    )
    if isinstance(spec, ExternalSpec):
        merge = partial(
            _merge_external,
            base_folder,
            adapter,
            saved=saved,
            spec=spec,
            out=out,
            quantize=quantize,
            dtype=dtype,
            file_dtype=file_dtype,
            side_files=side_files,
            max_shard_bytes=max_shard_bytes,
        )
        run_on_rank_0(ranks, merge)
        return
    assert isinstance(saved.spec, DecoderSpec)
    # Embedding and head differ as soon as one of them has an adapter.
    is_tied = saved.spec.tied and not {EMBEDDING, HEAD} & adapter.tensors.keys()
    merged_spec = replace(saved.spec, tied=is_tied)
    weights = _MergedWeights(
        merged_spec,
        adapter,
        saved,
        base=spec,
        base_folder=base_folder,
        quantize=quantize,
        dtype=dtype,
        file_dtype=file_dtype,
    )
    source_config = read_config(base_folder) | read_score_keys(adapter.metadata)
    config = export_config(source_config, merged_spec, file_dtype, side_files.carried)
    if merged_spec.vocab_size != spec.vocab_size:  # the adapter has a resized embedding
        config["vocab_size"] = merged_spec.vocab_size
    write_model(
        out,
        merged_spec,
        _plan_parameters(merged_spec, adapter, file_dtype),
        read=weights.read,
        # The weight of a score head belongs to the merged model's family: it is no extra parameter.
        extras=[name for name in adapter.extras if name != SCORE],
        config=config,
        side_files=side_files,
        max_shard_bytes=max_shard_bytes,
        world=ranks,
        reads_alone=True,
    )


def _plan_parameters(
    spec: DecoderSpec, adapter: AdapterFile, file_dtype: torch.dtype
) -> dict[str, PlannedTensor]:
    parameters = {
        name: PlannedTensor(name, file_dtype, shape)
        for name, shape in compute_parameter_shapes(spec).items()
    }
    for name, (_, entry) in adapter.extras.items():
        # Integer parameters of a recipe keep their dtype.
        dtype_in_file = DTYPES[entry.dtype]
        extra_dtype = file_dtype if dtype_in_file.is_floating_point else dtype_in_file
        parameters[name] = PlannedTensor(name, extra_dtype, entry.shape)
    return parameters


def _read_checked(
    base_folder: Path, adapter_folder: Path, implementation: str | None
) -> tuple[AdapterFile, ModelSpec, SavedWeights]:
    """Return the adapter, the spec of the base, and the full weights in the adapter's file.

    implementation: of the base, see `read_trained_spec`. Raises CheckpointError if base and adapter
    do not fit each other.
    """
    adapter = read_adapter(adapter_folder)
    if SCORE in adapter.extras:
        num_scores = adapter.extras[SCORE][1].shape[0]
        spec: ModelSpec = build_scored_spec(read_config(base_folder), str(base_folder), num_scores)
    else:
        spec = read_trained_spec(read_config(base_folder), str(base_folder), implementation)
    check_weights(spec, base_folder)
    adapter = read_adapter(adapter_folder, spec)
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base_folder)
    extras = {name for name, tensor in read_headers(base_folder).items() if tensor.extra}
    if extras - adapter.extras.keys():
        raise make_unknown_extras_error(base_folder, extras - adapter.extras.keys())
    return adapter, spec, saved


class _MergedWeights:
    """The parameters of a merged model: the base's as in the run, with the adapter added."""

    def __init__(
        self,
        spec: DecoderSpec,
        adapter: AdapterFile,
        saved: SavedWeights,
        *,
        base: ModelSpec,
        base_folder: Path,
        quantize: str,
        dtype: torch.dtype,
        file_dtype: torch.dtype,
    ) -> None:
        """Set up reading; only headers are read here.

        spec: of the merged model. saved: full weights in the adapter's file. base: spec of the
        base. quantize, dtype: of the base in the run. file_dtype: of floating-point tensors that
        `read` yields.
        """
        self._adapter = adapter
        self._saved = saved
        self._tensors = read_headers(base_folder)
        self._entries = {entry.our_name: entry for entry in build_weight_map(base, self._tensors)}
        self._quantize = quantize
        self._dtype = dtype
        self._file_dtype = file_dtype
        self._shapes = compute_parameter_shapes(spec)
        # Our module -> the adapted module in the files, which may be fused, and its part in it.
        self._modules: dict[str, tuple[FileModule, MergedRows]] = {}
        for module in adapter.list_modules(spec):
            self._modules |= {part.module: (module, part) for part in module.parts}

    def read(self, name: str) -> Iterator[Tensor]:
        """Yield a merged parameter in consecutive pieces of rows; stacked experts as one piece.

        name: our parameter.
        """
        if name in self._adapter.extras:
            extra = self._adapter.read_tensor(self._adapter.extras[name][0])
            yield extra.to(self._file_dtype) if extra.is_floating_point() else extra
            return
        shape = self._shapes[name]
        adapted = self._modules.get(name.removesuffix(".weight"))
        if len(shape) == 3:  # a layer's experts
            yield self._read_experts(name, None if adapted is None else adapted[0])
            return
        read_rows = self._open(name, shape)
        if len(shape) < 2:
            yield read_rows(0, shape[0]).to(self._file_dtype)
            return
        update = None
        if adapted is not None:
            module, part = adapted
            update = _read_update(self._adapter, module)
            if len(module.parts) > 1:  # a fused module, such as Phi 3's qkv_proj
                update = update.slice_rows(part.start, part.start + part.rows)
        for piece in merge_rows(read_rows, shape[0], update):
            yield piece.to(self._file_dtype)

    def _open(self, name: str, shape: tuple[int, ...]) -> Callable[[int, int], Tensor]:
        """Return a function `(start, stop) -> [stop - start, m]` that reads rows of a parameter.

        They are the base's as in the run: in its dtype, rounded if it quantized them. Full weights
        in the adapter's file replace the base's.
        """
        # The files of a base with a tied head have only the embedding.
        entry = self._entries.get(name) or self._entries[f"{EMBEDDING}.weight"]

        def read(start: int, stop: int) -> Tensor:
            with Reader(self._tensors) as reader:
                source = reader.open_entry(entry, self._dtype)
                rows = self._saved.read_rows(
                    name,
                    start=start,
                    stop=stop,
                    read_base=lambda: source[entry.start + start : entry.start + stop],
                )
                return rows.to(self._dtype)

        target = get_target(name.removesuffix(".weight"))
        is_linear = name.endswith(".weight") and target not in (None, "router", "embedding", "head")
        if not is_linear or name in self._saved.parameters or not self._is_rounded(*shape):
            return read
        # The whole matrix at once, as the run quantized it.
        weight = fake_quantize_weight(read(0, shape[0]), self._quantize)
        return lambda start, stop: weight[start:stop]

    def _is_rounded(self, rows: int, columns: int) -> bool:
        return self._quantize != "none" and can_quantize(columns, rows, self._quantize)

    def _read_experts(self, name: str, module: FileModule | None) -> Tensor:
        """Return the parameter `[E, o, i]` of a layer's experts, merged with their adapter.

        module: in the files; None: the experts have no adapter.
        """
        with Reader(self._tensors) as reader:
            weight = reader.open_entry(self._entries[name], self._dtype)[:].to(self._dtype)
        return _merge_experts(weight, self._adapter, module, self._quantize, self._file_dtype)


def _merge_experts(
    weight: Tensor,
    adapter: AdapterFile,
    module: FileModule | None,
    quantize: str,
    file_dtype: torch.dtype,
) -> Tensor:
    """Return the matrices `[E, o, i]` of a layer's experts, merged with their adapter.

    module: in the files; None: the experts have no adapter. quantize: of the base in the run.
    """
    if quantize != "none" and can_quantize(weight.shape[2], weight.shape[1], quantize):
        # As in the run: the experts of a layer are quantized together.
        weight = fake_quantize_weight(weight.flatten(0, 1), quantize).view_as(weight)
    if module is None:
        return weight.to(file_dtype)
    lora_a, lora_b = (adapter.read(module.name, suffix) for suffix in (LORA_A, LORA_B))
    scaling = adapter.config.compute_scaling(module)
    is_same_dtype = file_dtype == weight.dtype  # merged in place, without a second copy
    merged = weight if is_same_dtype else torch.empty_like(weight, dtype=file_dtype)
    all_factors = zip(*unstack_expert_factors(lora_a, lora_b, module), strict=True)
    for index, factors in enumerate(all_factors):
        merged[index] = _merge_matrix(weight[index], Update(*factors, scaling))
    return merged


@torch.no_grad()
def _merge_external(
    base_folder: Path,
    adapter: AdapterFile,
    *,
    saved: SavedWeights,
    spec: ExternalSpec,
    out: Path,
    quantize: str,
    dtype: torch.dtype,
    file_dtype: torch.dtype,
    side_files: SideFiles,
    max_shard_bytes: int,
) -> None:
    """Merge a model of another library, in host memory, on one rank; write the folder `out`.

    saved: full weights in the adapter's file. quantize, dtype: of the base in the run that trained
    the adapter. file_dtype: of the files. max_shard_bytes: as for `export_model`. Raises
    CheckpointError if the adapter has parameters that a recipe added, StorageError if the disk
    refuses; then `out` is as it was.
    """
    if adapter.extras:
        raise CheckpointError(
            f"{adapter.path}: holds {min(adapter.extras)}, which a recipe added; it cannot be"
            " merged"
        )
    model = build_meta(spec, dtype)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, base_folder)
    layout = spec.layout()
    adapted = {module.parts[0].module: module for module in adapter.list_modules(spec)}
    experts = {
        f"{name}.{leaf}": experts
        for name, experts in layout.experts.items()
        for leaf in (experts.inner, experts.outer)
    }
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        num_rows = len(parameter) if parameter.dim() else 1
        weight = saved.read_rows(name, start=0, stop=num_rows, read_base=parameter.detach)
        if module != name and module in layout.linears:
            rows, columns = weight.shape
            is_rounded = quantize != "none" and module in layout.plain
            if is_rounded and can_quantize(columns, rows, quantize):
                weight = fake_quantize_weight(weight, quantize)
            if module in adapted:
                # Conv1D of transformers (GPT-2) has its weight `[in, out]`.
                is_transposed = module in layout.transposed
                update = _read_update(adapter, adapted[module])
                merged = _merge_matrix(weight.t() if is_transposed else weight, update)
                weight = merged.t().contiguous() if is_transposed else merged
        elif module in layout.routers and module in adapted:
            weight = _merge_matrix(weight, _read_update(adapter, adapted[module]))
        elif name in experts:
            is_transposed = experts[name].transposed
            matrices = weight.transpose(1, 2) if is_transposed else weight
            merged = _merge_experts(matrices, adapter, adapted.get(name), quantize, file_dtype)
            weight = (merged.transpose(1, 2) if is_transposed else merged).contiguous()
        parameter.data = weight.to(file_dtype) if weight.is_floating_point() else weight
    export_model(
        model,
        spec=spec,
        source_config=read_config(base_folder),
        out=out,
        max_shard_bytes=max_shard_bytes,
        world=SingleRank(),
        **vars(side_files),  # its fields have the names of arguments
    )


def _merge_matrix(weight: Tensor, update: Update) -> Tensor:
    """Return a full matrix `[n, m]` with its update, computed by `merge_rows`."""
    return torch.cat(list(merge_rows(lambda start, stop: weight[start:stop], len(weight), update)))


def _read_update(adapter: AdapterFile, module: FileModule) -> Update:
    magnitudes = adapter.read(module.name, MAGNITUDE) if adapter.config.dora else None
    scaling = adapter.config.compute_scaling(module)
    if module.is_embedding:  # PEFT adapts the transposed weight: A and B change places
        return Update(
            lora_a=adapter.read(module.name, EMBEDDING_B).t(),
            lora_b=adapter.read(module.name, EMBEDDING_A).t(),
            scaling=scaling,
            magnitudes=magnitudes,
            by_column=True,
        )
    return Update(
        lora_a=adapter.read(module.name, LORA_A),
        lora_b=adapter.read(module.name, LORA_B),
        scaling=scaling,
        magnitudes=magnitudes,
    )
