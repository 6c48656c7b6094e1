"""Training-time test: the head learns on the hidden states that it will feed itself (EAGLE-3, arXiv 2503.01840, section 3.2).

Row i of a text holds the target's features of token i and the embedding of token i+1, and predicts token i+2. Step 0 is that
row. At step s the row holds the head's own hidden state of step s-1 and token i+1+s, as it does when the head has drafted s
tokens below it, and predicts token i+2+s.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from eagle.model.draft.network import DraftModel, causal


class DiagonalAttention:
    """What a row sees at step s: the true rows up to itself, and its own rows of steps 1..s (see ``eagle.model.draft.Attend``).

    So each row carries a chain of its own, all rows in one pass. The mask over the chain's part is a diagonal, which
    is a product by rows and not a matrix of scores.
    """

    def __init__(self):
        self.keys: list[Tensor] = []  # of each step, [B, heads, n, head_dim]
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        keys, values = kv.repeat_interleave(q.shape[1] // kv.shape[1], 1).chunk(2)
        self.keys.append(keys)
        self.values.append(values)
        if len(self.keys) == 1:
            return causal(q, kv)
        true_keys, *chain_keys = self.keys
        true_values, *chain_values = self.values
        rows, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ true_keys.mT).float().masked_fill(hidden, -torch.inf)
        chain = torch.stack(
            [(q * key).float().sum(-1) for key in chain_keys], -1
        )  # [B, heads, n, s]
        weights = (torch.cat((scores, chain), -1) * scale).softmax(-1).to(kv.dtype)
        own = sum(weights[..., rows + i, None] * value for i, value in enumerate(chain_values))
        return weights[..., :rows] @ true_values + own


@dataclass(frozen=True)
class Batch:
    """Texts padded at the end to n tokens.

    Attributes:
        ids: int64 ``[B, n]``.
        features: ``[B, n, aux_layers * h_target]`` of the target, entering its tapped layers.
        hidden: ``[B, n, h_target]`` of the target, what its output head reads.
        first: int64 ``[B]`` index of the first answer token.
        lengths: int64 ``[B]`` tokens without padding.
    """

    ids: Tensor
    features: Tensor
    hidden: Tensor
    first: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def supervised(batch: Batch, step: int) -> Tensor:
    """bool ``[B, n - 1]``: the rows that learn at a step.

    The target's prediction after token i+1+s must be one that drafting can ask for: from the first answer token on (it is the
    root of the first tree, so that the second one is the first to be drafted), up to the last token before the end.
    """
    row = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
    return (row + 1 >= batch.first[:, None]) & (row + 1 + step <= batch.lengths[:, None] - 2)


class TrainingTimeTest(nn.Module):
    """The loss of a head over several self-fed steps.

    Args:
        draft: the head, whose parameters are trained.
        embedding: the target's token embedding, frozen.
        output_head: the target's output head, frozen.
        steps: self-fed steps, the first one, on true features, included.
        decay: weight of each further step in the loss.

    Raises:
        ValueError: for fewer than one step, or a decay outside 0..1.
    """

    def __init__(
        self,
        draft: DraftModel,
        embedding: nn.Module,
        output_head: nn.Linear,
        steps: int,
        decay: float,
    ):
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        if not 0 < decay <= 1:
            raise ValueError(f"decay is {decay}; it must lie in 0..1, above 0")
        self.draft, self.steps, self.decay = draft, steps, decay
        ids = draft.target_ids()
        rows = slice(None) if ids is None else ids.to(output_head.weight.device)
        bias = None if output_head.bias is None else output_head.bias.detach()[rows]
        # In a tuple, so that they are neither trained nor saved with the head.
        self.frozen = (
            lambda tokens: embedding(tokens).detach(),
            output_head.weight.detach()[rows],
            bias,
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss (scalar) and, per step ``[steps]``, its cross-entropy and its top-1 agreement with the target.

        The target's law is its softmax over the draft vocabulary at temperature 1.
        """
        embedding, weight, bias = self.frozen
        dtype = self.draft.fc.weight.dtype
        learns = [supervised(batch, step) for step in range(self.steps)]
        attend = DiagonalAttention()
        hidden = self.draft.fuse(batch.features[:, :-1].to(dtype))
        rows = hidden.shape[1]
        angles = self.draft.angles(torch.arange(rows + self.steps, device=hidden.device), hidden)
        losses, agreement = [], []
        for step, learn in enumerate(learns):
            tokens = pad(batch.ids[:, 1 + step :], (0, step))
            hidden = self.draft(
                tokens,
                hidden,
                tuple(part[:, step : step + rows] for part in angles),
                attend,
                embedding,
            )
            # Without autocast: the law that is learnt has the precision that the target decodes in.
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                after = pad(batch.hidden[:, 1 + step :], (0, 0, 0, step))[learn]
                probs = linear(after.to(weight.dtype), weight, bias).float().softmax(-1)
            log_q = self.draft.logits(hidden[learn]).float().log_softmax(-1)
            count = max(probs.shape[0], 1)
            losses.append(-(probs * log_q).sum() / count)
            agreement.append((probs.argmax(-1) == log_q.argmax(-1)).float().sum() / count)
        loss = sum(self.decay**step * value for step, value in enumerate(losses))
        return loss, torch.stack(losses).detach(), torch.stack(agreement)
