"""Training-time test: the draft head learns on the hidden states that it will feed itself.

EAGLE-3, arXiv 2503.01840, section 3.2. Row i of a text joins the target's features of token i with
the embedding of token i+1, and predicts token i+2. This is step 0. At step s the row joins the
draft head's own hidden state of step s-1 with token i+1+s, and predicts token i+2+s. In decoding it
is the same: below token i+1 the draft head has then drafted s tokens.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from eagle.model.draft.network import DraftModel, causal


class DiagonalAttention:
    """Attention of the self-fed steps (see ``eagle.model.draft.network.Attend``).

    At step s row i sees the rows 0..i of step 0, and itself at steps 1..s. So each row carries a
    drafted chain of its own, and one pass computes a step for all rows. A row sees only itself in
    the later steps, so their scores are products row by row, not a matrix.
    """

    def __init__(self):
        self.keys: list[Tensor] = []  # of each step, [B, heads, n, head_dim]
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        """Attend from the rows of the next step.

        Args:
            q: ``[B, heads, n, head_dim]``.
            kv: ``[2 B, kv_heads, n, head_dim]``, keys first.

        Returns:
            ``[B, heads, n, head_dim]``.
        """
        keys, values = kv.repeat_interleave(q.shape[1] // kv.shape[1], 1).chunk(2)
        self.keys.append(keys)
        self.values.append(values)
        if len(self.keys) == 1:
            return causal(q, kv)
        first_keys, *own_keys = self.keys
        first_values, *own_values = self.values
        rows, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ first_keys.mT).float().masked_fill(later, -torch.inf)  # [B, heads, n, n]
        own = torch.stack([(q * key).float().sum(-1) for key in own_keys], -1)  # [B, heads, n, s]
        weights = (torch.cat((scores, own), -1) * scale).softmax(-1).to(kv.dtype)
        chain = sum(weights[..., rows + i, None] * value for i, value in enumerate(own_values))
        return weights[..., :rows] @ first_values + chain


@dataclass(frozen=True)
class Batch:
    """Texts, padded at the end to n tokens.

    Attributes:
        ids: int64 ``[B, n]``.
        features: ``[B, n, aux_layers * h_target]`` hidden states that enter the auxiliary layers.
        hidden: ``[B, n, h_target]`` hidden states that the target's output head reads.
        first: int64 ``[B]`` index of the first answer token.
        lengths: int64 ``[B]`` number of tokens without padding.
    """

    ids: Tensor
    features: Tensor
    hidden: Tensor
    first: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def supervised(batch: Batch, step: int) -> Tensor:
    """The rows that learn at a step, bool ``[B, n - 1]``.

    Row i learns if token i+1 belongs to the answer, and if the token that it predicts, i+2+s, is in
    the text. In decoding token i+1 is the root of a draft tree. The first answer token is the first
    root, so the second answer token is the first one that is drafted.

    Args:
        batch: the texts.
        step: s, from 0.
    """
    row = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
    return (row + 1 >= batch.first[:, None]) & (row + 1 + step <= batch.lengths[:, None] - 2)


class TrainingTimeTest(nn.Module):
    """The loss of a draft head over several self-fed steps.

    Args:
        draft: the draft head, whose parameters are trained.
        embedding: the target's token embedding, frozen.
        output_head: the target's output head, frozen.
        steps: number of steps, including step 0 on the target's features.
        decay: weight of a step in the loss, relative to the step before.

    Raises:
        ValueError: for fewer than one step, or a decay that is not above 0 and at most 1.
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
            raise ValueError(f"decay is {decay}; it must be above 0 and at most 1")
        self.draft, self.steps, self.decay = draft, steps, decay
        ids = draft.target_ids()
        rows = slice(None) if ids is None else ids.to(output_head.weight.device)
        weight = output_head.weight.detach()[rows]
        bias = None if output_head.bias is None else output_head.bias.detach()[rows]
        # A tuple hides them from nn.Module: they are neither trained nor saved with the draft head.
        self.frozen = (lambda tokens: embedding(tokens).detach(), weight, bias)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss of a batch.

        Returns:
            The loss (scalar), and for each step ``[steps]`` the cross-entropy with the target's
            probabilities (see ``target_probs``) and the share of rows in which target and draft
            head have the same most likely token.
        """
        embedding, _, _ = self.frozen
        attend = DiagonalAttention()
        hidden = self.draft.fuse(batch.features[:, :-1].to(self.draft.fc.weight.dtype))
        rows = hidden.shape[1]
        cos, sin = self.draft.angles(torch.arange(rows + self.steps, device=hidden.device), hidden)
        losses, agreement = [], []
        for step in range(self.steps):
            # 1. The draft head goes one step further, on its own hidden states.
            tokens = pad(batch.ids[:, 1 + step :], (0, step))
            angles = cos[:, step : step + rows], sin[:, step : step + rows]
            hidden = self.draft(tokens, hidden, angles, attend, embedding)
            # 2. Its predictions are compared with the target's.
            learn = supervised(batch, step)
            probs = self.target_probs(batch, step, learn)
            log_q = self.draft.logits(hidden[learn]).float().log_softmax(-1)
            count = max(probs.shape[0], 1)
            losses.append(-(probs * log_q).sum() / count)
            agreement.append((probs.argmax(-1) == log_q.argmax(-1)).float().sum() / count)
        loss = sum(self.decay**step * value for step, value in enumerate(losses))
        return loss, torch.stack(losses).detach(), torch.stack(agreement)

    @torch.no_grad()
    def target_probs(self, batch: Batch, step: int, learn: Tensor) -> Tensor:
        """The target's softmax over the draft vocabulary at temperature 1, float32.

        Args:
            batch: the texts.
            step: s. Row i gets the probabilities of token i+2+s.
            learn: bool ``[B, n - 1]`` rows that are wanted.

        Returns:
            ``[rows that are wanted, draft_vocab]``.
        """
        _, weight, bias = self.frozen
        hidden = pad(batch.hidden[:, 1 + step :], (0, 0, 0, step))[learn]
        # No autocast: the draft head must learn the probabilities as the target decodes with them.
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.to(weight.dtype), weight, bias).float().softmax(-1)
