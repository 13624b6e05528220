"""A model on the disk, or an adapter and its base, in the memory of all ranks: to be evaluated, not
trained.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from recipe_lib.adapters import add_adapters, disable_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_fits, read_adapter
from recipe_lib.checkpoint.adapter_loading import load_adapter
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.checkpoint.verify import make_adapter_settings
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.generation.source import GenerationSource
from recipe_lib.logs import get_logger
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.models import build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.parallel import DTYPES, Parallel, World, materialize, parallelize
from recipe_lib.parallel.world import derive_seed


@dataclass
class EvaluatedModel:
    """model: frozen, in this rank's memory. parallel: how it is divided. base: the name of what it
    was trained from, None where that is not known; `as_base` has it in place of what was trained.
    rounding: of the trained weights, as `qat` had it.
    """

    model: Decoder
    parallel: Parallel
    source: GenerationSource
    base: str | None
    rounding: FakeQuantization | None
    _load_base: Callable[[], None] | None = None

    @contextmanager
    def use_base_weights(self) -> Iterator[nn.Module]:
        """The model before training, in its own weights. Without adapters they replace the trained
        ones, for good.
        """
        if self.rounding is not None:
            self.rounding.is_on = False
        if self._load_base is not None:
            self._load_base()
        with disable_adapters(self.model) if self.source.adapter is not None else nullcontext():
            yield self.model


def load_evaluated_model(
    cfg: FullFinetuneConfig, source: GenerationSource, world: World, storage: str, base: Path | None
) -> EvaluatedModel:
    """Reads the weights, each rank its part as `cfg.parallel` divides them.

    storage: how an adapter's base is kept, as `lora.quantize_base`. base: of a model without
    adapters, the folder that its training began from; None with cfg.model.preset: random weights of
    cfg.seed.
    """
    dtype = DTYPES[cfg.dtype]
    spec = source.base_spec or source.spec
    model = build_meta(spec, dtype)
    if source.adapter is not None:
        held = read_adapter(source.adapter)
        check_fits(held, spec)
        lora = make_adapter_settings(held, spec)
        kept = replace(lora, quantize_base=storage, dtype=None if cfg.dtype == "fp64" else "fp32")
        assert isinstance(cfg, LoraFinetuneConfig)
        cfg = replace(cfg, lora=kept)
        add_adapters(model, kept, dtype)
    model.requires_grad_(False)
    rounding = fake_quantize_linears(
        model, cfg.qat, cfg.qat_group_size, 0
    )  # what the export rounds
    if rounding is not None:
        get_logger().info("%s", rounding.describe())
    parallel = parallelize(model, cfg, world, for_training=False)
    materialize(model, cfg.memory, world.device)
    load_weights(model, spec, source.folder)
    if source.adapter is not None:
        init_adapters(model, 0)
        load_adapter(model, spec, source.adapter, some=True)
        return EvaluatedModel(model.eval(), parallel, source, str(source.folder), rounding)
    load: Callable[[], None] | None = None
    if base is not None:
        load = partial(load_weights, model, source.spec, base)
    elif cfg.model.preset is not None:
        load = partial(init_weights, model, derive_seed(cfg.seed, "model"), source.spec)
    name = str(base) if base is not None else cfg.model.preset
    return EvaluatedModel(model.eval(), parallel, source, name, rounding, load)
