"""What the draft head remembers in one request."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from eagle.model.cache import KVBuffer
from eagle.model.draft.network import DraftModel


class DraftState:
    """The head's key/value cache: committed positions, and behind them the tree being grown.

    The row of committed position t is computed from token t+1 and the target's true features of
    t. The rows of a tree are computed from the head's own hidden states; the next commit
    overwrites them.

    Args:
        model: the draft head.
        embedding: the target's token embedding.
        capacity: number of rows, those of the tree included.
        new_buffer: makes the key/value buffer; called as ``KVBuffer`` is.

    Attributes:
        last: ``[1, h]`` hidden state of the last committed position.
        hidden: ``[F, h]`` hidden states of the newest rows: the last committed position, then the
            newest level of the tree.
        seen: bool ``[F, keys]``, which committed positions and tree rows each newest row sees.
    """

    def __init__(
        self,
        model: DraftModel,
        embedding: nn.Module,
        capacity: int,
        new_buffer: Callable[..., KVBuffer] = KVBuffer,
    ):
        self.model, self.embedding = model, embedding
        heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
        self.buffer = new_buffer(1, heads, head_dim, capacity, model.dtype, model.device)
        # [2, 1, capacity, head_dim] rotary cosines and sines of all positions, and of tree levels.
        self.angles = torch.stack(model.angles(self.buffer.rows, model.norm.weight))
        self.tree_angles = self.angles
        self.eye = torch.eye(0, dtype=torch.bool, device=model.device)
        self.last: Tensor
        self.hidden: Tensor
        self.seen: Tensor | None = None

    def commit(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Add committed positions.

        Args:
            tokens: int64 ``[n]``, one position ahead of the features: position t gets token t+1.
            features: ``[n, layers * h_target]`` from the target's auxiliary layers.

        Returns:
            The draft logits ``[draft_vocab]`` after the last position.
        """
        buffer = self.buffer
        start, end = buffer.length, buffer.length + tokens.numel()
        rows = slice(start, end)
        mask = buffer.rows[:end] <= buffer.rows[rows, None] if start else None
        hidden = self.fuse_and_run(tokens, features, rows, mask, end)
        buffer.advance(tokens.numel())
        return self.set_last(hidden[-1:])

    def fuse_and_run(
        self,
        tokens: Tensor,
        features: Tensor,
        rows: slice | Tensor,
        mask: Tensor | None,
        end: int,
    ) -> Tensor:
        """Hidden states ``[n, h]`` of tokens ``[n]`` at ``rows``, from the target's features."""
        fused = self.model.fuse(features.to(self.model.dtype))
        return self.run(tokens, fused, self.angles[:, :, rows], mask, rows, end)

    def set_last(self, last: Tensor) -> Tensor:
        """Remember the last committed position's hidden state ``[1, h]``; returns its logits."""
        self.last = last
        self.forget_tree()
        return self.model.logits(last)[0]

    def forget_tree(self) -> None:
        """Go back to the committed positions: another tree can be grown from them."""
        self.hidden, self.seen = self.last, None

    def begin_tree(self) -> Tensor:
        """Set the rotary angles of the tree's levels.

        Returns:
            What the root sees: all committed positions, bool ``[1, keys]``.
        """
        length = self.buffer.length
        self.tree_angles = self.angles[:, :, length:]
        return torch.ones(1, length, dtype=torch.bool, device=self.model.device)

    def expand(self, tokens: Tensor, parent_ranks: Tensor, level: int) -> Tensor:
        """Draft logits ``[F, draft_vocab]`` after F tree nodes (see ``rheo.tree.Expand``)."""
        n = tokens.numel()
        seen = self.begin_tree() if self.seen is None else self.seen
        if self.eye.shape[0] < n:
            self.eye = torch.eye(n, dtype=torch.bool, device=tokens.device)
        first = seen.shape[1]
        # A node sees what its parent sees, and itself.
        self.seen = torch.cat((seen.index_select(0, parent_ranks), self.eye[:n, :n]), 1)
        angles, rows = self.tree_angles[:, :, level - 1 : level], slice(first, first + n)
        hidden = self.hidden.index_select(0, parent_ranks)
        self.hidden = self.run(tokens, hidden, angles, self.seen, rows, first + n)
        return self.model.logits(self.hidden)

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        angles: Tensor,
        mask: Tensor | None,
        rows: slice | Tensor,
        end: int,
    ) -> Tensor:
        """Run n tokens through the head and store their keys and values.

        Args:
            tokens: int64 ``[n]``.
            hidden: ``[n, h]`` hidden states that they join.
            angles: ``[2, 1, n or 1, head_dim]`` of their positions.
            mask: bool ``[n, end]``, which rows each token sees; None is causal.
            rows: rows of the buffer where they are stored.
            end: they can see the rows below this one.

        Returns:
            ``[n, h]`` hidden states.
        """

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            k, v = self.buffer.write(0, kv, rows, end)
            causal = mask is None
            return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)

        return self.model(tokens[None], hidden[None], angles.unbind(), attend, self.embedding)[0]
