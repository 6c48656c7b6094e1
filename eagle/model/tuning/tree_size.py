"""``total_token=-1``, ``depth=-1``: the draft tree that gives the most tokens a second, by measurement."""

import hashlib
import itertools
import json
import platform
import time
import warnings
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from eagle.files import replace_text
from eagle.model.decoding import decode
from eagle.model.demo import cache_folder
from eagle.model.draft.network import DraftModel
from eagle.model.draft.state import DraftState
from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from eagle.model.target import TargetModel
from eagle.model.tuning.contexts import contexts
from rheo import Draws, build_tree
from rheo.tree import best_first

SIZES = (4, 5, 6, 8, 10, 12, 16, 24, 32, 40, 50, 60, 80, 100)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
ROUNDS = 5
TEXT, EVERY = 64, 6  # tokens that the target writes for the trial, and from one tree to the next


def choose_tree(
    target: TargetModel,
    draft: DraftModel,
    prompt: Tensor,
    total_token: int | None,
    depth: int | None,
    top_k: int,
) -> tuple[int, int]:
    """``total_token`` and ``depth`` of the most expected tokens a second of drafting and verification, at temperature 1.

    Measured once; the result is kept in the user's cache folder by target, head, device, threads and what is given.

    Args:
        prompt: int64 ``[L]``, what the target writes the trial's text after.
        total_token, depth: where they are given, they stay; None is to be chosen, from ``SIZES`` and ``DEPTHS``.
    """
    sizes, depths = (
        SIZES if total_token is None else (total_token,),
        DEPTHS if depth is None else (depth,),
    )
    path = cache_folder() / "tree-size.json"
    key = identity(target, draft, total_token, depth, top_k)
    known = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        print(
            "Choosing the size of the draft tree by measurement, once for this pair and machine; best with nothing else running",
            flush=True,
        )
        options = DecodingOptions(
            WarperOptions(1.0), total_token=max(sizes), depth=max(depths), tree_top_k=top_k
        )
        context = prompt.numel() + TEXT
        tau = expected_tokens(target, draft, prompt, options, depths)
        drafting = {
            levels: drafting_seconds(target, draft, context, replace(options, depth=levels))
            for levels in depths
        }
        verification = {
            nodes: median(times)
            for nodes, times in verification_seconds(target, sizes, context).items()
        }
        best = best_tree(tau, drafting, verification)
        known = (json.loads(path.read_text()) if path.exists() else {}) | {key: best}
        try:
            replace_text(path, json.dumps(known, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            warnings.warn(
                f"the size could not be kept in {path} ({error}); it will be measured again",
                stacklevel=2,
            )
    print(
        f"total_token {known[key][0]}, depth {known[key][1]}, as measured (kept in {path})",
        flush=True,
    )
    return tuple(known[key])


def identity(
    target: TargetModel, draft: DraftModel, total_token: int | None, depth: int | None, top_k: int
) -> str:
    """What a measurement holds for."""
    place = (
        torch.cuda.get_device_name(target.device)
        if target.device.type == "cuda"
        else f"cpu x{torch.get_num_threads()}"
    )
    place = f"{platform.node()} {place}"
    name = (
        target.config.name_or_path or hashlib.sha256(str(target.config).encode()).hexdigest()[:16]
    )
    quantised = getattr(target.config, "quantization_config", None)
    kind = (
        str(target.dtype)[6:]
        if quantised is None
        else hashlib.sha256(str(quantised).encode()).hexdigest()[:16]
    )
    kind += ", packed" if target.packed else ""
    given = "".join(
        f", {label} {value}"
        for label, value in (("total_token", total_token), ("depth", depth))
        if value is not None
    )
    # The last words tell entries that hold nodes and depth from older ones, which hold nodes alone.
    return f"{name} {kind}, head {draft.fingerprint}, {place}, torch {torch.__version__}{given}, top-k {top_k}, chosen tree"


def best_tree(
    tau: dict[int, Tensor], drafting: dict[int, float], verification: dict[int, float]
) -> tuple[int, int]:
    """Nodes and depth of the tree of the most tokens a second.

    Args:
        tau: by depth, ``[N]`` expected tokens of a cycle whose tree has 1, 2, ..., N nodes; N is the largest that there are candidates for.
        drafting: seconds of growing a tree, by depth.
        verification: seconds of the target's forward, by number of nodes.
    """

    def rate(tree: tuple[int, int]) -> float:
        nodes, depth = tree
        return tau[depth][min(nodes, len(tau[depth])) - 1].item() / (
            drafting[depth] + verification[nodes]
        )

    return max(itertools.product(verification, drafting), key=rate)


def expected_tokens(
    target: TargetModel,
    draft: DraftModel,
    prompt: Tensor,
    options: DecodingOptions,
    depths: tuple[int, ...],
) -> dict[int, Tensor]:
    """Expected tokens of a cycle ``[N]``, by depth, for Top-K trees of 1 to N = ``options.total_token`` nodes, on a text of the target's own.

    A smaller tree holds the best nodes of a larger one, a shallower tree those of its levels, and whether a node of a Top-K tree is reached
    does not depend on the others. (A shallow tree has more nodes to choose from than the large tree kept of its levels, so that for
    many nodes on few levels the true value is a little higher.)

    Args:
        depths: none larger than ``options.depth``.
    """
    plain = DecodingOptions(options.warpers, sampling="none", max_new_tokens=TEXT)
    for generation in decode(target, None, prompt, plain):
        pass
    text = generation.output_ids[0]
    positions = list(range(prompt.numel(), text.numel(), EVERY))
    sums: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    for context in contexts(target, draft, text, positions, [options]):
        for depth, found in sums.items():
            held = context.tree.levels <= depth + 1
            order = best_first(context.tree.log_scores.masked_fill(~held, -torch.inf))[1]
            found.append((context.reach * held)[order].cumsum(0))
    return {depth: torch.stack(found).mean(0) for depth, found in sums.items()}


@torch.inference_mode()
def drafting_seconds(
    target: TargetModel,
    draft: DraftModel,
    context: int,
    options: DecodingOptions,
    rounds: int = ROUNDS,
) -> float:
    """Median seconds of taking two tokens in and growing one tree behind ``context`` committed tokens and a few more."""
    device, dtype = draft.device, draft.dtype
    state = DraftState(
        draft, target.embedding, context + 2 * (rounds + 1) + options.depth * (options.tree_top_k + 1)
    )
    features = torch.zeros(context, draft.fc.in_features, device=device, dtype=dtype)
    root = torch.zeros((), dtype=torch.long, device=device)
    state.commit(root.expand(context), features)
    target_ids = draft.target_ids()
    draws = Draws(torch.Generator(device=device).manual_seed(0))
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        logits = state.commit(root.expand(2), features[:2])
        build_tree(root, logits, state.expand, options.tree, draws, target_ids).tokens[
            0
        ].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first is a warm-up


@torch.inference_mode()
def verification_seconds(
    target: TargetModel, sizes: tuple[int, ...], context: int, rounds: int = ROUNDS
) -> dict[int, list[float]]:
    """Seconds of the target's forward over trees of some sizes behind ``context`` committed tokens; the sizes take turns."""
    cache = target.new_cache(context + max(sizes))
    target.prefill(torch.zeros(context, dtype=torch.long, device=target.device), cache, [])
    seconds: dict[int, list[float]] = {nodes: [] for nodes in sizes}
    for number in range(rounds + 1):
        for nodes in sizes:
            tokens = torch.zeros(nodes, dtype=torch.long, device=target.device)
            mask = torch.eye(nodes, dtype=torch.bool, device=target.device)
            start = time.perf_counter()
            target.tree_forward(tokens, tokens, mask, cache, []).logits[0, 0].item()
            if number:  # the first round is a warm-up
                seconds[nodes].append(time.perf_counter() - start)
    return seconds
