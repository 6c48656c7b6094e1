"""``total_token=-1``: the size of the draft tree that gives the most tokens a second, by measurement."""

import hashlib
import json
import platform
import time
import warnings
from statistics import median

import torch
from torch import Tensor

from eagle.files import replace_text
from eagle.model.acceptance import contexts
from eagle.model.decoding import DecodingOptions, decode
from eagle.model.demo import cache_folder
from eagle.model.draft import DraftModel, DraftState
from eagle.model.law import SamplingOptions
from eagle.model.target import TargetModel
from rheo import Draws, build_tree

CANDIDATES = (8, 12, 16, 24, 32, 40, 50, 60, 80, 100)
ROUNDS = 5
TEXT, EVERY = 64, 6  # tokens that the target writes for the trial, and from one tree to the next


def choose_total_token(target: TargetModel, draft: DraftModel, prompt: Tensor, depth: int, top_k: int) -> int:
    """The candidate of the most expected tokens a second of drafting and verification, at temperature 1.

    Measured once; the result is kept in the user's cache folder by target, head, device, threads and shape of the tree.

    Args:
        prompt: int64 ``[L]``, what the target writes the trial's text after.
    """
    path = cache_folder() / "tree-size.json"
    key = identity(target, draft, depth, top_k)
    known = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        print("Choosing the size of the draft tree by measurement, once for this pair and machine; best with nothing else running", flush=True)
        options = DecodingOptions(SamplingOptions(1.0), total_token=max(CANDIDATES), depth=depth, top_k=top_k)
        tau = expected_tokens(target, draft, prompt, options)
        drafting = drafting_seconds(target, draft, prompt.numel() + TEXT, options)
        verification = verification_seconds(target, CANDIDATES, prompt.numel() + TEXT)
        size = best_size(tau, {n: drafting + median(times) for n, times in verification.items()})
        known = (json.loads(path.read_text()) if path.exists() else {}) | {key: size}
        try:
            replace_text(path, json.dumps(known, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            warnings.warn(f"the size could not be kept in {path} ({error}); it will be measured again", stacklevel=2)
    print(f"total_token {known[key]}, as measured (kept in {path})", flush=True)
    return known[key]


def identity(target: TargetModel, draft: DraftModel, depth: int, top_k: int) -> str:
    """What a measurement holds for."""
    place = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    place = f"{platform.node()} {place}"
    head = hashlib.sha256(draft.fc.weight.detach().cpu().float().numpy().tobytes()).hexdigest()[:16]
    name = target.config.name_or_path or hashlib.sha256(str(target.config).encode()).hexdigest()[:16]
    quantised = getattr(target.config, "quantization_config", None)
    kind = str(target.dtype)[6:] if quantised is None else hashlib.sha256(str(quantised).encode()).hexdigest()[:16]
    return f"{name} {kind}, head {head}, {place}, torch {torch.__version__}, depth {depth}, top-k {top_k}"


def best_size(tau: Tensor, seconds: dict[int, float]) -> int:
    """The tree size of the most tokens a second.

    Args:
        tau: ``[N]`` expected tokens of a cycle whose tree has 1, 2, ..., N nodes; N is the largest that there are candidates for.
        seconds: of a cycle, by tree size.
    """
    return max(seconds, key=lambda nodes: tau[min(nodes, len(tau)) - 1].item() / seconds[nodes])


def expected_tokens(target: TargetModel, draft: DraftModel, prompt: Tensor, options: DecodingOptions) -> Tensor:
    """Expected tokens of a cycle ``[N]`` for Top-K trees of 1 to N = ``options.total_token`` nodes, on a text of the target's own.

    A smaller tree holds the best nodes of a larger one, and whether a node of a Top-K tree is reached does not depend on the others.
    """
    plain = DecodingOptions(options.law, sampling="none", max_new_tokens=TEXT)
    for generation in decode(target, None, prompt, plain):
        pass
    text = generation.output_ids[0]
    places = list(range(prompt.numel(), text.numel(), EVERY))
    sums = []
    for context in contexts(target, draft, text, places, [options]):
        best_first = torch.where(context.tree.valid, context.tree.log_scores, -torch.inf).sort(descending=True, stable=True).indices
        sums.append(context.reach[best_first].cumsum(0))
    return torch.stack(sums).mean(0)


@torch.inference_mode()
def drafting_seconds(target: TargetModel, draft: DraftModel, context: int, options: DecodingOptions, rounds: int = ROUNDS) -> float:
    """Median seconds of growing one tree behind ``context`` committed tokens."""
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    state = DraftState(draft, target.embedding, context + options.depth * (options.top_k + 1))
    features = torch.zeros(context, draft.fc.in_features, device=device, dtype=dtype)
    root = torch.zeros((), dtype=torch.long, device=device)
    logits, target_ids = state.commit(root.expand(context), features), draft.target_ids()
    draws = Draws(torch.Generator(device=device).manual_seed(0))
    times = []
    for _ in range(rounds + 1):
        state.forget_tree()
        start = time.perf_counter()
        build_tree(root, logits, state.expand, options.tree, draws, target_ids).tokens[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first is a warm-up


@torch.inference_mode()
def verification_seconds(target: TargetModel, sizes: tuple[int, ...], context: int, rounds: int = ROUNDS) -> dict[int, list[float]]:
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
