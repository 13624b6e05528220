"""How likely a model finds each label, and how likely its likeliest token: without gradients, and without the logits of
all tokens. Where the two are equal, greedy decoding gives the label.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from recipe_lib.ops.cross_entropy import Finish, largest_of, own_columns
from recipe_lib.ops.fused_loss import IGNORED
from recipe_lib.ops.gathered import Group, all_reduce
from recipe_lib.ops.token_log_probs import head_logits, labels_by_rank, row_pieces


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    softcap: float | None = None,
    group: Group | None = None,
    bias: Tensor | None = None,
    finish: Finish | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`[..., 2]`: log-probabilities of the labels, and of the likeliest tokens; both 0 where a label is -100.

    hidden: `[..., d]`. weight: `[v, d]`. labels: int64 `[...]`. chunks: pieces the rows are cut into. softcap, group,
    bias, finish: as in `token_log_probs`. project: in place of weight and bias, `fn(hidden [m, d]) -> logits [m, v]`.

    fp32 (fp64 for fp64), in which the logits are before anything else is done with them.
    """
    rows, targets = hidden.flatten(0, -2), labels_by_rank(labels, group)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scores = torch.empty((*targets.shape, 2), dtype=wide, device=hidden.device)
    for part in row_pieces(rows.shape[0], chunks):
        if project is None:
            logits = head_logits(rows[part], weight, bias, group).to(wide)
        else:
            logits = project(rows[part]).to(wide)
        if finish is not None:
            logits = finish(logits)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        unwanted = targets[:, part].flatten() == IGNORED
        columns, elsewhere = own_columns(targets[:, part].flatten(), unwanted, logits.shape[1], group)
        largest = largest_of(logits, group)
        chosen = logits.gather(1, columns).squeeze(1)
        sums = (logits - largest).exp().sum(dim=1)
        del logits
        if elsewhere is not None and group is not None:
            sums, chosen = all_reduce(torch.stack([sums, chosen.masked_fill_(elsewhere, 0)]), "sum", group)
        found = torch.stack([chosen, largest.squeeze(1)], dim=1)
        found -= (sums.log() + largest.squeeze(1)).unsqueeze(1)
        scores[:, part] = found.masked_fill_(unwanted.unsqueeze(1), 0).unflatten(0, (len(targets), -1))
    return scores.view(*labels.shape, 2)
