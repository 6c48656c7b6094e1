"""Candidate pools: the tokens that compete below one tree node (paper section 3.2)."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.scores import acceptance_scores, paper_scores

LEAD, SAMPLED, FILL = 0, 1, 2
KIND_NAMES = ("lead", "sampled", "fill")
NORMALISERS = ("support", "full")
AUTO = "auto"
AUTO_LEAD = 1  # lead slots with m AUTO, if the pool has room for them beside the sampled slot
GREEDY_BELOW = 1e-5  # a temperature below this one means argmax


def parse_m(text: str) -> int | str:
    """Read ``--m`` of a command line: a whole number, or "auto".

    Raises:
        ArgumentTypeError: for anything else.
    """
    if text != AUTO and not text.lstrip("-").isdecimal():
        raise ArgumentTypeError(f"m is {text!r}; it must be a whole number or {AUTO!r}")
    return AUTO if text == AUTO else int(text)


@dataclass(frozen=True)
class PoolOptions:
    """How a pool of candidates is made.

    Attributes:
        size: K, the number of slots.
        m: number of lead slots before the sampled slot, 0 <= m <= K-1. AUTO is AUTO_LEAD lead
            slots with ``acceptance_scores``. None is the Top-K pool: K lead slots, no sampled
            slot, scores from the softmax over the full draft vocabulary.
        support: number of highest draft logits that carry the draft distribution q; 0 means all.
        temperature: decoding temperature. It acts on the distribution of the sampled token, and
            with AUTO on the scores.
        normaliser: "support" takes scores from the softmax over the support (section 3.2), "full"
            from the softmax over the whole draft vocabulary. Top-K always uses "full".

    Raises:
        ValueError: for a value outside these ranges.
    """

    size: int = 10
    m: int | str | None = 1
    support: int = 128
    temperature: float = 1.0
    normaliser: str = "support"

    def __post_init__(self):
        m, highest = self.m, self.size - 1
        if self.size < 1:
            raise ValueError(f"top_k (slots of a pool) is {self.size}; it must be at least 1")
        if m not in (None, AUTO) and not (isinstance(m, int) and 0 <= m <= highest):
            raise ValueError(
                f"m is {m!r}; with top_k {self.size} it must lie in 0..{highest}, or be {AUTO!r}"
            )
        if self.support < 0:
            raise ValueError(
                f"support is {self.support}; it must be 0 (the whole draft vocabulary) or positive"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if self.normaliser not in NORMALISERS:
            choices = ", ".join(NORMALISERS)
            raise ValueError(f"normaliser is {self.normaliser!r}; choose one of {choices}")

    @property
    def random(self) -> bool:
        """Whether a slot of the pool is sampled at random."""
        return self.m is not None and self.temperature >= GREEDY_BELOW

    def lead_slots(self, support: int) -> int:
        """Number of lead slots of a pool over a support of so many tokens."""
        width = min(self.size, support)
        if self.m is None:
            return width
        if isinstance(self.m, int):
            return min(self.m, support)
        return min(AUTO_LEAD, width - 1)


@dataclass(frozen=True)
class Pools:
    """Pools of P parents, with W = min(K, S) slots each in the order lead, sampled, fill.

    S is the number of tokens of the support and m the number of lead slots.

    Attributes:
        tokens: int64 ``[P, W]`` candidate ids in the target vocabulary.
        log_proxy: ``[P, W]`` log score of each slot; -inf for a slot that does not exist.
        kinds: kind of each of the W slots (LEAD, SAMPLED or FILL), the same for all parents.
        draft_tail: int64 ``[P, S - m]`` draft ids of the support without the lead tokens, by
            falling logit. A Top-K pool has none.
        tail_weights: ``[P, S - m]`` weights of ``draft_tail``, proportional to q_tail. The sampled
            token was drawn from them.
    """

    tokens: Tensor
    log_proxy: Tensor
    kinds: tuple[int, ...]
    draft_tail: Tensor
    tail_weights: Tensor


def build_pools(
    logits: Tensor, options: PoolOptions, draws: Draws, target_ids: Tensor | None = None
) -> Pools:
    """Make the pools of P parents from their draft logits (section 3.2).

    No score depends on the sampled token, and the sampled slot scores at least as high as every
    fill slot. So whether the slot survives pruning cannot depend on its token.

    Args:
        logits: ``[P, V]`` draft logits. Computed in float32, or in float64 if they are float64.
        options: how the pools are made.
        draws: samples the tokens.
        target_ids: int64 ``[V]`` target id of each draft id; None if the vocabularies are equal.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    parents, vocab = logits.shape
    top_k, auto = options.m is None, options.m == AUTO
    n_support = min(options.size if top_k else options.support or vocab, vocab)
    width = min(options.size, n_support)
    n_lead = options.lead_slots(n_support)

    # The only sort. Its order is stored: a second sort could order ties differently.
    top, ids = logits.topk(n_support)  # [P, S]
    tail, kinds = ids[:, n_lead:], slot_kinds(width, n_lead)
    # NaN or infinite logits lower acceptance, but the output stays lossless.
    log_q = None
    if top_k or options.normaliser == "full":
        log_q = logits.log_softmax(-1, dtype=precision).gather(1, ids)
        log_q = torch.nan_to_num(log_q, nan=-torch.inf, neginf=-torch.inf)
        if top_k:
            tokens = in_target_vocabulary(ids, target_ids)
            return Pools(tokens, log_q, kinds, tail, log_q[:, n_lead:])
    # topk puts NaN first; the largest number in its place keeps the order.
    top = torch.nan_to_num(top.to(precision), nan=torch.finfo(precision).max)
    if n_lead == n_support:  # nothing is left to sample
        log_q = top.log_softmax(-1) if log_q is None else log_q
        return Pools(in_target_vocabulary(ids, target_ids), log_q, kinds, tail, top[:, n_lead:])

    q = top.softmax(-1) if log_q is None else log_q.exp()
    if options.temperature == 1 and not auto:
        weights = q[:, n_lead:]  # q itself is proportional to q_tail; this saves a softmax
    else:
        weights = tempered(top[:, n_lead:], options.temperature)
    ranks = slot_ranks(width, n_lead, n_support, logits.device)
    if options.random:
        ranks = ranks.index_select(0, draws.token(weights))  # [P, W]
    else:
        ranks = ranks[:1].expand(parents, -1)  # greedy: the first token of the tail
    score_rule = acceptance_scores if auto else paper_scores
    own, proxy = score_rule(q, weights)
    scores = own.gather(1, ranks)  # a tail without mass gives its slots a score of 0
    scores[:, n_lead : n_lead + 1] = proxy
    tokens = in_target_vocabulary(ids.gather(1, ranks), target_ids)
    return Pools(tokens, torch.log(scores), kinds, tail, weights)


def in_target_vocabulary(ids: Tensor, target_ids: Tensor | None) -> Tensor:
    """Target ids of draft ids of any shape; ``target_ids`` as in ``build_pools``."""
    return ids if target_ids is None else target_ids.index_select(0, ids.flatten()).view_as(ids)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """The softmax of falling logits ``[P, n]`` at a temperature; greedy: 1 for the first token."""
    if temperature < GREEDY_BELOW:
        probs = torch.zeros_like(logits)
        probs[:, 0] = 1
        return probs
    if temperature != 1:
        # Subtract first: a large quotient has no digits left for the difference.
        logits = (logits - logits[:, :1]) / temperature
    return logits.softmax(-1)


def slot_kinds(width: int, n_lead: int) -> tuple[int, ...]:
    """The kinds of W slots. If all of them are lead slots, there is no sampled slot."""
    return ((LEAD,) * n_lead + (SAMPLED,) + (FILL,) * width)[:width]


@cache  # one tensor for all calls: a CUDA graph reads it at a fixed address
def slot_ranks(width: int, n_lead: int, n_support: int, device: torch.device) -> Tensor:
    """A table of the token of each slot, by the sampled token.

    The fill slots hold the next tokens in order, without the sampled one. For a support of 128,000
    tokens and K = 10 the table takes 10 MB.

    Returns:
        int64 ``[S - m, W]``. Row r is for a sampled token with rank r in the tail. Its entries are
        the ranks in the support of the tokens in the W slots.
    """
    drawn = torch.arange(n_lead, n_support)[:, None]
    lead, fill = torch.arange(n_lead), torch.arange(n_lead, width - 1)
    table = torch.cat((lead.expand(len(drawn), -1), drawn, fill + (fill >= drawn)), 1)
    return table.to(device)
