"""Candidate pools: which tokens compete below one tree node, and with which score (paper section 3.2)."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rheo.draws import Draws
from rheo.scores import acceptance_scores, sampled_proxy

LEAD, SAMPLED, FILL = 0, 1, 2
KIND_NAMES = ("lead", "sampled", "fill")
NORMALISERS = ("support", "full")
AUTO = "auto"
AUTO_LEAD = 1  # lead slots with m AUTO, where the pool has so many besides the sampled one
GREEDY_BELOW = 1e-5  # temperatures under this one mean argmax


def parse_m(text: str) -> int | str:
    """``--m`` of a command line: a number, or auto."""
    if text != AUTO and not text.lstrip("-").isdecimal():
        raise ArgumentTypeError(f"m is {text!r}; it must be a number or {AUTO!r}")
    return AUTO if text == AUTO else int(text)


@dataclass(frozen=True)
class PoolOptions:
    """How a pool of candidates is made.

    Attributes:
        size: K, the number of slots.
        m: number of lead slots before the sampled one, 0 <= m <= K-1; None builds the Top-K pool
            (K lead slots, no sampled one, scores over the full draft vocabulary); AUTO is AUTO_LEAD
            with other scores (``acceptance_scores``), good at every temperature.
        support: how many of the highest draft logits carry the draft law q; 0 means all.
        temperature: decoding temperature; touches only the law of the sampled slot (and with AUTO the scores).
        normaliser: "support" scores tokens by the softmax over the support (section 3.2), "full" by the
            softmax over the whole draft vocabulary. Top-K always uses "full".

    Raises:
        ValueError: for a value outside these ranges.
    """

    size: int = 10
    m: int | str | None = 1
    support: int = 128
    temperature: float = 1.0
    normaliser: str = "support"

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"top_k (slots of a pool) is {self.size}; it must be at least 1")
        if self.m not in (None, AUTO) and not (
            isinstance(self.m, int) and 0 <= self.m <= self.size - 1
        ):
            raise ValueError(
                f"m is {self.m!r}; with top_k {self.size} it must lie in 0..{self.size - 1}, or be {AUTO!r}"
            )
        if self.support < 0:
            raise ValueError(
                f"support is {self.support}; it must be 0 (the whole draft vocabulary) or positive"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if self.normaliser not in NORMALISERS:
            raise ValueError(
                f"normaliser is {self.normaliser!r}; choose one of {', '.join(NORMALISERS)}"
            )

    @property
    def random(self) -> bool:
        """Whether chance decides about a slot."""
        return self.m is not None and self.temperature >= GREEDY_BELOW


@dataclass(frozen=True)
class Pools:
    """Pools of P parents; W = min(K, support) slots each, in slot order (lead, sampled, fill).

    Attributes:
        tokens: int64 ``[P, W]`` candidate ids in the target vocabulary.
        log_proxy: ``[P, W]`` log of the score of each slot; -inf marks a slot that does not exist, or whose score rounds to 0.
        kinds: of each slot, one of LEAD, SAMPLED, FILL; the same for all parents.
        draft_tail: int64 ``[P, S - m]`` the support's ids in the draft vocabulary behind the lead tokens, by falling logit; none of a Top-K pool.
        tail_weights: ``[P, S - m]`` in proportion to q_tail, the law on ``draft_tail`` from which the sampled token was drawn.
    """

    tokens: Tensor
    log_proxy: Tensor
    kinds: tuple[int, ...]
    draft_tail: Tensor
    tail_weights: Tensor


def build_pools(
    logits: Tensor, options: PoolOptions, draws: Draws, target_ids: Tensor | None = None
) -> Pools:
    """Make the pool of each of P parents from their draft logits.

    Args:
        logits: ``[P, V]`` draft logits; computed in float32, or in float64 when given so.
        target_ids: int64 ``[V]`` target id of each draft id; None where the vocabularies agree.

    Returns:
        The pools. Every score is independent of the sampled token, and the sampled slot's score is at
        least that of every fill slot: survival of the slot cannot depend on which token it holds.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    parents, vocab = logits.shape
    top_k_only = options.m is None
    n_support = min(options.size if top_k_only else options.support or vocab, vocab)
    width = min(options.size, n_support)
    auto = options.m == AUTO
    if top_k_only:
        n_lead = width
    elif auto:
        n_lead = min(AUTO_LEAD, width - 1)
    else:
        n_lead = min(options.m, n_support)

    top, ids = logits.topk(
        n_support
    )  # [P, S], the only sort; its order is stored and used by verification
    tail, kinds = ids[:, n_lead:], slot_kinds(width, n_lead)
    # A draft that emits NaN or infinities is only a bad draft: it costs acceptance, never correctness. A softmax over all of it is lost as a whole.
    log_q = None
    if top_k_only or options.normaliser == "full":
        log_q = torch.nan_to_num(
            logits.log_softmax(-1, dtype=precision).gather(1, ids),
            nan=-torch.inf,
            neginf=-torch.inf,
        )
    if top_k_only:
        return Pools(in_target_vocabulary(ids, target_ids), log_q, kinds, tail, log_q[:, n_lead:])
    top = torch.nan_to_num(
        top.to(precision), nan=torch.finfo(precision).max
    )  # NaN stands first: the order still falls
    if n_lead == n_support:  # nothing to sample
        log_q = top.log_softmax(-1) if log_q is None else log_q
        return Pools(in_target_vocabulary(ids, target_ids), log_q, kinds, tail, top[:, n_lead:])

    q = top.softmax(-1) if log_q is None else log_q.exp()
    # At temperature 1 q itself weighs the tail, which saves a softmax (acceptance scores want one); at others a softmax of its own keeps digits.
    weights = (
        q[:, n_lead:]
        if options.temperature == 1 and not auto
        else tempered(top[:, n_lead:], options.temperature)
    )
    ranks = slot_ranks(width, n_lead, n_support, logits.device)
    # [P, W] rank in the support of each slot's token; all of a greedy tail is on its first token
    ranks = (
        ranks.index_select(0, draws.token(weights))
        if options.random
        else ranks[:1].expand(parents, -1)
    )
    own, proxy = acceptance_scores(q, weights) if auto else (q, sampled_proxy(q, n_lead))
    scores = own.gather(1, ranks)  # (a tail without mass gives its slots scores of 0)
    scores[:, n_lead : n_lead + 1] = proxy
    return Pools(
        in_target_vocabulary(ids.gather(1, ranks), target_ids),
        torch.log(scores),
        kinds,
        tail,
        weights,
    )


def in_target_vocabulary(ids: Tensor, target_ids: Tensor | None) -> Tensor:
    """Target ids of draft ids of any shape."""
    return ids if target_ids is None else target_ids.index_select(0, ids.flatten()).view_as(ids)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Law of falling logits ``[P, n]`` at a temperature; all on the first one where that is greedy."""
    if temperature < GREEDY_BELOW:
        probs = torch.zeros_like(logits)
        probs[:, 0] = 1
        return probs
    if temperature != 1:
        logits = (
            logits - logits[:, :1]
        ) / temperature  # the difference first: a large quotient has no digits left for it
    return logits.softmax(-1)


def slot_kinds(width: int, n_lead: int) -> tuple[int, ...]:
    """The kinds of W slots; where all are lead ones there is no sampled one."""
    return ((LEAD,) * n_lead + (SAMPLED,) + (FILL,) * width)[:width]


@lru_cache(maxsize=None)  # a CUDA graph reads it where it is
def slot_ranks(width: int, n_lead: int, n_support: int, device: torch.device) -> Tensor:
    """int64 ``[S - m, W]``, by the rank in the tail of the token drawn: which rank in the support the token of each slot has.

    The fill slots are the next tokens in order, stepping over the sampled one. (10 MB for a support of 128,000 tokens and K = 10.)
    """
    drawn = torch.arange(n_lead, n_support)[:, None]
    lead, fill = torch.arange(n_lead), torch.arange(n_lead, width - 1)
    return torch.cat((lead.expand(len(drawn), -1), drawn, fill + (fill >= drawn)), 1).to(device)
