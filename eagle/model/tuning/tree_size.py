"""``total_token=-1``, ``depth=-1``: find the draft tree of the most tokens per second."""

import hashlib
import itertools
import json
import platform
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from eagle.files import replace_text
from eagle.model.decoding import decode
from eagle.model.demo import cache_folder
from eagle.model.draft import DraftModel, DraftState
from eagle.model.options import DecodingOptions
from eagle.model.sampling import WarperOptions
from eagle.model.target import TargetModel
from eagle.model.tuning.contexts import contexts
from rheo import Draws, build_tree
from rheo.tree import best_first

SIZES = (4, 5, 6, 8, 10, 12, 16, 24, 32, 40, 50, 60, 80, 100)  # values of total_token to try
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
ROUNDS = 5  # timings of each size and depth
TEXT = 64  # tokens that the target writes for the measurement
EVERY = 6  # tokens of that text from one measured tree to the next


def choose_tree(
    target: TargetModel,
    draft: DraftModel,
    prompt: Tensor,
    total_token: int | None,
    depth: int | None,
    top_k: int,
) -> tuple[int, int]:
    """Choose the tree with the most expected tokens per second of drafting and verification.

    The measurement is made at temperature 1, once. The result is kept in the user's cache folder
    for this target, draft head, device, number of threads, version of torch and arguments.

    Args:
        target: the target.
        draft: its draft head.
        prompt: int64 ``[L]``; the target continues it for the measurement.
        total_token: a fixed number of nodes; None to choose one of ``SIZES``.
        depth: a fixed depth; None to choose one of ``DEPTHS``.
        top_k: slots of a candidate pool.

    Returns:
        ``total_token`` and ``depth``.
    """
    path = cache_folder() / "tree-size.json"
    key = identity(target, draft, total_token, depth, top_k)
    known = read_known(path)
    if key not in known:
        print(
            "Measuring which size of the draft tree is fastest, once for this pair of models on "
            "this machine. Run nothing else meanwhile.",
            flush=True,
        )
        sizes = SIZES if total_token is None else (total_token,)
        depths = DEPTHS if depth is None else (depth,)
        best = measure_best_tree(target, draft, prompt, sizes, depths, top_k)
        known = read_known(path) | {key: best}  # other processes may have added theirs meanwhile
        try:
            replace_text(path, json.dumps(known, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            warnings.warn(
                f"the size of the tree could not be saved in {path} ({error}); it will be measured "
                "again",
                stacklevel=2,
            )
    nodes, levels = known[key]
    print(f"The fastest tree has total_token {nodes} and depth {levels} (see {path}).", flush=True)
    return nodes, levels


def read_known(path: Path) -> dict:
    """The trees chosen before, ``[total_token, depth]`` by ``identity``."""
    return json.loads(path.read_text()) if path.exists() else {}


def identity(
    target: TargetModel, draft: DraftModel, total_token: int | None, depth: int | None, top_k: int
) -> str:
    """A text that names everything that a measurement depends on."""
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    else:
        device = f"cpu x{torch.get_num_threads()}"
    name = target.config.name_or_path or digest(target.config)
    quantised = getattr(target.config, "quantization_config", None)
    kind = str(target.dtype).removeprefix("torch.") if quantised is None else digest(quantised)
    packed = ", packed" if target.packed else ""
    fixed = "" if total_token is None else f", total_token {total_token}"
    fixed += "" if depth is None else f", depth {depth}"
    # Entries of older versions, which hold the number of nodes alone, do not end in "chosen tree".
    return (
        f"{name} {kind}{packed}, head {draft.fingerprint}, {platform.node()} {device}, "
        f"torch {torch.__version__}{fixed}, top-k {top_k}, chosen tree"
    )


def digest(config: object) -> str:
    """A short name for a config without one."""
    return hashlib.sha256(str(config).encode()).hexdigest()[:16]


def measure_best_tree(
    target: TargetModel,
    draft: DraftModel,
    prompt: Tensor,
    sizes: tuple[int, ...],
    depths: tuple[int, ...],
    top_k: int,
) -> tuple[int, int]:
    """The best of some sizes and depths (see ``best_tree``), by measurement."""
    options = DecodingOptions(
        WarperOptions(1.0), total_token=max(sizes), depth=max(depths), tree_top_k=top_k
    )
    context = prompt.numel() + TEXT
    tau = expected_tokens(target, draft, prompt, options, depths)
    drafting = {
        depth: drafting_seconds(target, draft, context, replace(options, depth=depth))
        for depth in depths
    }
    times = verification_seconds(target, sizes, context)
    return best_tree(tau, drafting, {nodes: median(times[nodes]) for nodes in sizes})


def best_tree(
    tau: dict[int, Tensor], drafting: dict[int, float], verification: dict[int, float]
) -> tuple[int, int]:
    """The tree with the most tokens per second.

    Args:
        tau: by depth, ``[N]`` expected tokens of a cycle whose tree has 1, 2, ..., N nodes. There
            are no candidates for more than N nodes.
        drafting: by depth, seconds of growing a tree.
        verification: by number of nodes, seconds of the target's forward.

    Returns:
        Number of nodes and depth.
    """

    def rate(tree: tuple[int, int]) -> float:
        nodes, depth = tree
        expected = tau[depth][min(nodes, len(tau[depth])) - 1].item()
        return expected / (drafting[depth] + verification[nodes])

    return max(itertools.product(verification, drafting), key=rate)


def expected_tokens(
    target: TargetModel,
    draft: DraftModel,
    prompt: Tensor,
    options: DecodingOptions,
    depths: tuple[int, ...],
) -> dict[int, Tensor]:
    """Expected tokens per cycle of Top-K trees of every size, on a text that the target writes.

    All sizes and depths are read from one large tree: a smaller tree holds its best nodes, a
    shallower one its upper levels, and whether a node of a Top-K tree is reached does not depend
    on the other nodes. (For many nodes on few levels the result is a little too low: a shallow
    tree can keep nodes that the large tree has pruned.)

    Args:
        target: the target.
        draft: its draft head.
        prompt: int64 ``[L]``; the target continues it.
        options: of the largest tree, with N = ``options.total_token`` nodes.
        depths: none larger than ``options.depth``.

    Returns:
        By depth, ``[N]`` expected tokens of trees of 1, 2, ..., N nodes.
    """
    plain = DecodingOptions(options.warpers, sampling="none", max_new_tokens=TEXT)
    *_, generation = decode(target, None, prompt, plain)
    text = generation.output_ids[0]
    positions = list(range(prompt.numel(), text.numel(), EVERY))
    found: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    for context in contexts(target, draft, text, positions, [options]):
        for depth in depths:
            held = context.tree.levels <= depth + 1
            order = best_first(context.tree.log_scores.masked_fill(~held, -torch.inf))[1]
            found[depth].append((context.reach * held)[order].cumsum(0))
    return {depth: torch.stack(sums).mean(0) for depth, sums in found.items()}


@torch.inference_mode()
def drafting_seconds(
    target: TargetModel,
    draft: DraftModel,
    context: int,
    options: DecodingOptions,
    rounds: int = ROUNDS,
) -> float:
    """Median seconds of drafting: commit two tokens, then grow one tree.

    Args:
        target: the target; only its token embedding is used.
        draft: its draft head.
        context: number of committed tokens before the first tree. Every tree adds two.
        options: size of the tree.
        rounds: number of timings.
    """
    device = draft.device
    rows = context + 2 * (rounds + 1) + options.depth * (options.tree_top_k + 1)
    state = DraftState(draft, target.embedding, rows)
    features = torch.zeros(context, draft.fc.in_features, device=device, dtype=draft.dtype)
    root = torch.zeros((), dtype=torch.long, device=device)
    state.commit(root.expand(context), features)
    target_ids = draft.target_ids()
    draws = Draws(torch.Generator(device=device).manual_seed(0))
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        logits = state.commit(root.expand(2), features[:2])
        tree = build_tree(root, logits, state.expand, options.tree, draws, target_ids)
        tree.tokens[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first round is a warm-up


@torch.inference_mode()
def verification_seconds(
    target: TargetModel, sizes: tuple[int, ...], context: int, rounds: int = ROUNDS
) -> dict[int, list[float]]:
    """Seconds of the target's forward over trees of some sizes.

    Every round times all sizes once, so that a slow moment of the machine meets them all.

    Args:
        target: the target.
        sizes: numbers of nodes.
        context: number of committed tokens.
        rounds: timings of each size.

    Returns:
        By number of nodes, ``rounds`` timings.
    """
    cache = target.new_cache(context + max(sizes))
    target.prefill(torch.zeros(context, dtype=torch.long, device=target.device), cache, [])
    seconds: dict[int, list[float]] = {nodes: [] for nodes in sizes}
    for number in range(rounds + 1):
        for nodes in sizes:
            tokens = torch.zeros(nodes, dtype=torch.long, device=target.device)
            mask = torch.eye(nodes, dtype=torch.bool, device=target.device)
            start = time.perf_counter()
            target.tree_forward(tokens, tokens, mask, cache, []).logits[0, 0].item()  # waits
            if number > 0:  # the first round is a warm-up
                seconds[nodes].append(time.perf_counter() - start)
    return seconds
