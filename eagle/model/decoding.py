"""The generation loop: draft, verify, commit. Every way of calling the model goes through ``decode``."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle.model.draft import DraftModel, DraftState
from eagle.model.law import SamplingOptions, TargetLaw
from eagle.model.target import TargetModel
from rheo import KIND_NAMES, SAMPLED, VERIFICATIONS, Draws, PoolOptions, Tree, TreeOptions, Verdict, build_tree, pick, verify

SAMPLINGS = ("topk", "rheo", "none")


@dataclass(frozen=True)
class DecodingOptions:
    """Everything that decides the output of one request, except the models and the prompt.

    Attributes:
        law: temperature and filters of the target.
        sampling: "topk" or "rheo" draft trees, "none" for plain decoding.
        m, support, verification, normaliser: of the rheo pool; None takes 1, 128, "rheo", "support". They
            belong to "rheo" alone.
        total_token, depth, top_k: tree nodes with the root, expansions after the first level, slots of a pool.
        max_new_tokens: exact cap on new tokens.
        max_length: cap on prompt and new tokens together; None for no cap.
        seed: of the request's one generator.
        stop_token_ids: stop tokens besides the model's own.

    Raises:
        ValueError: quoting the value and the valid choices.
    """

    law: SamplingOptions = field(default_factory=SamplingOptions)
    sampling: str = "topk"
    m: int | str | None = None
    support: int | None = None
    verification: str | None = None
    normaliser: str | None = None
    total_token: int = 60
    depth: int = 7
    top_k: int = 10
    max_new_tokens: int = 512
    max_length: int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"sampling is {self.sampling!r}; choose one of {', '.join(SAMPLINGS)}")
        if self.sampling != "rheo":
            for name in ("m", "support", "verification", "normaliser"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} belongs to sampling 'rheo', not to {self.sampling!r}")
        if self.verification not in (None, *VERIFICATIONS):
            raise ValueError(f"verification is {self.verification!r}; choose one of {', '.join(VERIFICATIONS)}")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        _ = self.tree  # builds, and so checks, the tree's options

    @property
    def tree(self) -> TreeOptions:
        """The draft tree's options."""
        if self.sampling == "rheo":
            pool = PoolOptions(
                size=self.top_k,
                m=1 if self.m is None else self.m,
                support=128 if self.support is None else self.support,
                temperature=self.law.temperature,
                normaliser=self.normaliser or "support",
            )
        else:
            pool = PoolOptions(size=self.top_k, m=None)
        return TreeOptions(pool, self.total_token, self.depth)


@dataclass
class Generation:
    """The result of one request, complete once decoding has ended.

    Attributes:
        prompt_ids: int64 ``[1, L]``.
        token_ids: the tokens kept after the prompt.
        accept_lengths: per cycle what verification accepted, plus 1 for the bonus token; in the last cycle the
            cap or a stop token may have kept less.
        accepted_kinds: per cycle the slot kinds (rheo.KIND_NAMES) of the accepted tokens.
        survivals: per cycle, of each visited node that has children: whether the sampled one is among them.
        seconds: wall time per phase: prefill, draft, verify, commit; empty on a GPU unless timing was asked for.
        stop_reason: "stop" (stop token) or "length" (cap).
    """

    prompt_ids: Tensor
    token_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    accepted_kinds: list[list[str]] = field(default_factory=list)
    survivals: list[list[bool]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    stop_reason: str = "length"

    @property
    def output_ids(self) -> Tensor:
        """int64 ``[1, L + new_tokens]`` prompt and new tokens, a tensor of the caller's own."""
        new = torch.tensor([self.token_ids], dtype=self.prompt_ids.dtype, device=self.prompt_ids.device)
        return torch.cat((self.prompt_ids, new), 1)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cycles(self) -> int:
        return len(self.accept_lengths)


class Stopwatch:
    """Adds wall time to named phases; on a GPU only where it may synchronise, since launch times mean nothing."""

    def __init__(self, seconds: dict[str, float], device: torch.device, synchronise: bool):
        self.seconds, self.device = seconds, device
        self.running = synchronise or device.type == "cpu"
        self.last = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin a phase now."""
        if self.running:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Give the time since the phase began to ``phase``, and begin the next one."""
        if self.running:
            before = self.last
            self.restart()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self.last - before


class NonFiniteLogits(RuntimeError):
    """The target produced NaN or infinite logits; nothing was committed from them."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(
            f"the target's logits hold NaN or infinity in {dtype}: nothing was committed from them. "
            "Load the model with dtype='bf16' or dtype='fp32'."
        )


@torch.inference_mode()
def decode(
    target: TargetModel,
    draft: DraftModel | None,
    input_ids: Tensor,
    options: DecodingOptions,
    stop_ids: frozenset[int] = frozenset(),
    timing: bool = False,
) -> Iterator[Generation]:
    """Generate from one prompt; yields the growing result after every cycle, and once where there is none.

    Args:
        draft: the EAGLE-3 head; not used with ``sampling="none"``.
        input_ids: int64 ``[1, L]`` or ``[L]`` prompt.
        stop_ids: the model's stop tokens; output ends at the first one, which is kept.
        timing: synchronise the device at every phase, so that ``seconds`` means what it says on a GPU.

    Raises:
        ValueError: for an empty or batched prompt, ids outside the vocabulary, or a length beyond a cap.
        NonFiniteLogits: where the target's logits are NaN or infinite.
    """
    prompt = check_prompt(input_ids, target, options).to(target.device)
    generation = Generation(prompt_ids=prompt[None])
    budget = options.max_new_tokens
    if options.max_length is not None:
        budget = min(budget, options.max_length - prompt.numel())
    if target.window is not None and prompt.numel() + budget > target.window:
        raise ValueError(
            f"the target attends to {target.window} tokens and the request may reach {prompt.numel() + budget}; "
            f"lower max_new_tokens or max_length (currently {options.max_new_tokens} and {options.max_length})"
        )
    if budget <= 0:
        yield generation
        return

    stop_ids = stop_ids | frozenset(options.stop_token_ids)
    law, tree_options = TargetLaw(options.law), options.tree
    draws = Draws(torch.Generator(device=target.device).manual_seed(options.seed))
    drafting = options.sampling != "none"
    taps = draft.taps if drafting else []
    cache = target.new_cache(prompt.numel() + budget + options.total_token)
    state = None
    if drafting:
        state = DraftState(draft, target.embedding, prompt.numel() + budget + options.depth * (options.top_k + 1))
        target_ids = draft.target_ids()
    watch = Stopwatch(generation.seconds, target.device, timing)

    # Prefill: the first token is the root of the first cycle.
    prefill = target.prefill(prompt, cache, taps)
    p = law(prefill.logits[0])
    root = draws.token(p)
    if p.isnan().any():
        raise NonFiniteLogits(target.dtype)
    _keep(generation, [root.item()], budget, stop_ids)
    emitted, features = torch.cat((prompt[1:], root[None])), prefill.features
    watch.lap("prefill")
    if _finished(generation, budget, stop_ids):
        yield generation
        return

    while True:
        # 1. Draft: the head takes in the tokens committed since, with their true features, and grows a tree.
        if drafting:
            root_logits = state.commit(emitted, features)
            tree = build_tree(root, root_logits, state.expand, tree_options, draws, target_ids)
        else:
            tree = lone_root(root)
        watch.lap("draft")

        # 2. Verify: one forward of the target over the tree, then a walk down from the root.
        output = target.tree_forward(tree.tokens, tree.levels, tree.mask, cache, taps)
        verdict = verify(tree, lambda node: law(pick(output.logits, node)), draws, options.verification or "rheo")
        path, tokens, kinds, survived, finite = to_host(tree, verdict)
        if not finite:
            raise NonFiniteLogits(target.dtype)
        watch.lap("verify")

        # 3. Commit: keep the accepted path in the cache and hand its features to the head.
        kept = verdict.path[: len(path)]
        cache.keep(kept)
        emitted, root = verdict.tokens[: len(path)], verdict.tokens[len(path) - 1]
        features = output.features[kept] if drafting else features
        generation.accept_lengths.append(len(tokens))
        generation.accepted_kinds.append(kinds)
        generation.survivals.append(survived)
        _keep(generation, tokens, budget, stop_ids)
        watch.lap("commit")
        yield generation
        if _finished(generation, budget, stop_ids):
            return
        watch.restart()  # what the caller did between two cycles is not ours


def to_host(tree: Tree, verdict: Verdict) -> tuple[list[int], list[int], list[str], list[bool], bool]:
    """The one copy of a cycle: path, emitted tokens, kinds of the accepted nodes, survivals (see ``Generation``), finiteness."""
    # Per node: its children, and beside them as many more as the tree has nodes where the sampled one is there.
    many = tree.tokens.numel()
    children = torch.zeros_like(tree.parents).index_add(0, tree.parents, tree.drafted * (1 + many * (tree.kinds == SAMPLED)))
    columns = verdict.path, verdict.tokens, tree.kinds[verdict.path], children[verdict.path]
    *rows, count, finite = torch.cat((*columns, verdict.count.reshape(1), verdict.finite.long().reshape(1))).tolist()
    path, tokens, kinds, families = (rows[i * len(rows) // 4 :][:count] for i in range(4))
    return path, tokens, [KIND_NAMES[k] for k in kinds[1:]], [family > many for family in families if family], bool(finite)


def lone_root(root: Tensor) -> Tree:
    """The tree of plain decoding: nothing drafted, so that verification draws one token from p."""
    zero, one = torch.zeros_like(root).reshape(1), torch.ones(1, dtype=torch.bool, device=root.device)
    nothing = torch.zeros(1, 1, device=root.device)
    return Tree(
        root.reshape(1), zero, zero, zero - 1, one, nothing[0], one[None], zero, zero[None], nothing, max_levels=0
    )


def check_prompt(input_ids: Tensor, target: TargetModel, options: DecodingOptions) -> Tensor:
    """The prompt as int64 ``[L]``; raises a ValueError for what cannot be decoded."""
    if input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has a batch of {input_ids.shape[0]}; decoding takes one sequence at a time")
    prompt = input_ids.reshape(-1).long()
    if prompt.numel() == 0:
        raise ValueError("input_ids is empty; decoding needs at least one token")
    if prompt.min() < 0 or prompt.max() >= target.vocab_size:
        raise ValueError(f"input_ids holds ids outside the target's vocabulary 0..{target.vocab_size - 1}")
    if options.max_length is not None and prompt.numel() > options.max_length:
        raise ValueError(f"the prompt has {prompt.numel()} tokens and max_length is {options.max_length}; raise max_length")
    return prompt


def _keep(generation: Generation, tokens: list[int], budget: int, stop_ids: frozenset[int]) -> None:
    """Append emitted tokens up to the first stop token or the cap, whichever comes first."""
    for token in tokens[: budget - generation.new_tokens]:
        generation.token_ids.append(token)
        if token in stop_ids:
            generation.stop_reason = "stop"
            return


def _finished(generation: Generation, budget: int, stop_ids: frozenset[int]) -> bool:
    return generation.stop_reason == "stop" or generation.new_tokens >= budget
