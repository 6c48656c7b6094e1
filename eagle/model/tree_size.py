"""``total_token=-1``: choose the size of the draft tree by measuring the target's verification forward."""

import math
import statistics
import time

import torch

from eagle.model.target import TargetModel

CANDIDATES = (8, 12, 16, 24, 32, 40, 50, 60)
REPEATS = 5
# Accepted length grows about with the logarithm of the tree's size. Measured on the demo pair (docs/LOG.md): tau of
# Top-K at T = 1 with 12 nodes, and what each doubling up to 60 nodes adds.
TAU_AT_12, TAU_PER_DOUBLING = 1.67, 0.10


def choose_total_token(target: TargetModel, context: int = 64) -> int:
    """The candidate size with the most expected tokens per second of verification.

    Args:
        context: committed tokens during the measurement.
    """
    return best_size({nodes: forward_seconds(target, nodes, context) for nodes in CANDIDATES})


def best_size(seconds: dict[int, float]) -> int:
    """The tree size of the highest expected tau per second, from the seconds that each size takes."""
    return max(seconds, key=lambda nodes: (TAU_AT_12 + TAU_PER_DOUBLING * math.log2(nodes / 12)) / seconds[nodes])


@torch.inference_mode()
def forward_seconds(target: TargetModel, nodes: int, context: int) -> float:
    """Median seconds of one verification forward over ``nodes`` nodes."""
    cache = target.new_cache(context + nodes)
    target.prefill(torch.zeros(context, dtype=torch.long, device=target.device), cache, [])
    tokens = torch.zeros(nodes, dtype=torch.long, device=target.device)
    mask = torch.eye(nodes, dtype=torch.bool, device=target.device)
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        target.tree_forward(tokens, tokens, mask, cache, []).logits[0, 0].item()  # reading a number waits for the device
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first is a warm-up
