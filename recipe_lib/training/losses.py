"""What the output head computes: the loss that a config names, in the chunks that it asks for.

The built-in loss is `recipe_lib.ops.chunked_heads`; a plugin registers its own, `fn(logits [m, v], labels [m]) -> sum`.
"""

from recipe_lib.config.registry import registered
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.ops.head_losses import CrossEntropy


def build_head_loss(cfg: FullFinetuneConfig) -> CrossEntropy:
    """The sum of token losses of `loss`, in `memory.loss_chunks` chunks.

    ConfigError with the nearest name if no loss of that name is registered.
    """
    return CrossEntropy(cfg.memory.loss_chunks, registered("loss", cfg.loss))
