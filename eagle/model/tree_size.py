"""``total_token=-1``: choose the size of the draft tree by measuring the target's verification forward."""

import statistics
import time

import torch

from eagle.model.target import TargetModel

CANDIDATES = (8, 12, 16, 24, 32, 40, 50, 60)
REPEATS = 5
# Accepted length grows about with the logarithm of the tree's size; per doubling it gained 0.25 tokens a cycle
# from 8 to 60 nodes on the demo pair at T = 1 (docs/LOG.md).
BASE, PER_DOUBLING = 1.6, 0.25


@torch.inference_mode()
def choose_total_token(target: TargetModel, context: int = 64) -> int:
    """The candidate size with the most expected tokens per second of verification.

    Args:
        context: committed tokens during the measurement.
    """
    seconds = {n: _forward_seconds(target, n, context) for n in CANDIDATES}
    gain = {n: BASE + PER_DOUBLING * (n / CANDIDATES[0] - 1 + 1e-9) ** 0 * torch.tensor(n / CANDIDATES[0]).log2().item() for n in CANDIDATES}
    return max(CANDIDATES, key=lambda n: gain[n] / seconds[n])


def _forward_seconds(target: TargetModel, nodes: int, context: int) -> float:
    cache = target.new_cache(context + nodes)
    target.prefill(torch.zeros(context, dtype=torch.long, device=target.device), cache, [])
    tokens = torch.zeros(nodes, dtype=torch.long, device=target.device)
    mask = torch.eye(nodes, dtype=torch.bool, device=target.device)
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        target.tree_forward(tokens, (tokens + 1), mask, cache, []).logits[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
