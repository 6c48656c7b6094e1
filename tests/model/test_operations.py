"""What a cycle does besides the target's forward: few operations, and no wait for data."""

from contextlib import nullcontext

import pytest
import torch
from support.tiny import tiny_pair

from eagle.model import decoding
from eagle.model.cuda_graph import STEP, FixedShapeBuffer, FixedShapeDraftState
from eagle.model.cycle import summarise, to_cpu
from eagle.model.ea_model import EaModel
from eagle.model.sampling import TargetProbs, WarperOptions
from evaluation.speed.operations import Operations
from rheo import AUTO, Draws, PoolOptions, TreeOptions, build_tree, verify, verify_greedily

LIMIT = 450  # operations of a cycle at K 10, depth 7, 60 nodes
LIMIT_AUTO = LIMIT + 85  # with m = auto
TREE = {"total_token": 60, "depth": 7, "top_k": 10}
PAIR = {"vocab": 512, "draft_vocab": 256, "layers": 8, "aux_layers": (2, 4, 5)}
PROMPT = torch.tensor([[3, 1, 2, 3]])

over_pools = pytest.mark.parametrize("m", [None, 0, 1, 2, AUTO])  # None: Top-K
over_temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])


def limit(m):
    return LIMIT_AUTO if m == AUTO else LIMIT


def tree_options(m, temperature):
    return TreeOptions(PoolOptions(10, m, 128, temperature), 60, 7)


def cycle_without_data(options, verification, temperature, counting=None):
    """Run a cycle, without the target's forward, as on a GPU, on tensors that hold no values.

    Args:
        options: size of the tree and its pools.
        verification: "rheo" or "rrsw".
        temperature: of the target.
        counting: a context around the operations of the cycle.

    Returns:
        The tree and the result of verification.
    """
    model, meta = tiny_pair(**PAIR), torch.device("meta")
    head, embedding = model.draft.to(meta), model.target.embedding.to(meta)
    state = FixedShapeDraftState(head, embedding, 200, options.depth, STEP)
    cache = FixedShapeBuffer(2, 2, 4, 300, torch.float32, meta, STEP)
    probs, draws = TargetProbs(WarperOptions(temperature)), Draws(None)
    logits, features = torch.zeros(60, 512, device=meta), torch.zeros(60, 48, device=meta)
    root, target_ids = torch.zeros((), dtype=torch.long, device=meta), head.target_ids()
    with torch.inference_mode():
        state.commit(root.expand(5), features[:5])
        root_logits = head.logits(state.last)[0]
        with counting or nullcontext():
            tree = build_tree(root, root_logits, state.expand, options, draws, target_ids)
            if probs.greedy:
                verified = verify_greedily(tree, lambda nodes: logits, at_once=True)
            else:
                verified = verify(
                    tree, lambda nodes: probs(logits), draws, verification, at_once=True
                )
            summary = summarise(tree, verified)
            cache.keep_first(verified.path, verified.count)
            state.commit(verified.tokens, features[verified.path], verified.count)
        # A read of such tensors is an error, as this one at the end of the cycle shows.
        with pytest.raises((NotImplementedError, RuntimeError)):
            to_cpu(summary, 60)
    return tree, verified


@over_pools
def test_a_cycle_takes_at_most_450_operations_outside_the_targets_forward(m):
    model = tiny_pair(**PAIR, **TREE)
    sampling = {"sampling": "topk"} if m is None else {"sampling": "rheo", "m": m}
    counting = Operations()
    cycles = model.stream(PROMPT, model.options(temperature=1.0, max_new_tokens=60, **sampling))
    next(cycles)  # makes what is made once per request
    with counting, counting.leaving_out(model.target):
        for _ in range(5):
            result = next(cycles)
    accepted = sum(result.accept_lengths[1:6]) / 5 - 1
    operations = counting.counts.total() / 5
    details = operations, accepted, counting.counts.most_common(12)
    # Each accepted token is one more step along the path. Under 300 the counter would be wrong.
    assert 300 < operations <= limit(m) - 10 + 60 * accepted, details


@over_temperatures
@over_pools
def test_a_cycle_of_a_gpu_takes_at_most_450_operations_outside_the_targets_forward(m, temperature):
    """A GPU decides at all nodes at once, so that accepted tokens cost nothing more."""
    options = tree_options(m, temperature)
    cycle_without_data(options, "rheo", temperature)  # makes what is made once
    counting = Operations()
    cycle_without_data(options, "rheo", temperature, counting)
    assert 300 < counting.counts.total() <= limit(m), counting.counts.most_common(12)


@pytest.mark.parametrize(
    "m, verification",
    [(m, "rheo") for m in (None, 0, 1, 2)] + [(m, "rrsw") for m in (0, 1, 2)],
)
@over_temperatures
def test_nothing_in_a_cycle_waits_for_data(m, verification, temperature):
    """Until the one copy at the end of a cycle no value is read: the tensors hold none."""
    tree, verified = cycle_without_data(tree_options(m, temperature), verification, temperature)
    assert tree.tokens.shape == (60,)
    assert verified.tokens.shape == (9,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "sampling",
    [
        {"sampling": "topk"},
        {"sampling": "rheo", "m": 1},
        {"sampling": "rheo", "verification": "rrsw"},
    ],
)
def test_on_a_gpu_only_the_end_of_a_cycle_synchronises(sampling, monkeypatch):
    cpu = tiny_pair(**PAIR)
    model = EaModel(cpu.base_model.cuda(), cpu.draft.cuda(), **TREE, cuda_graph=False)
    allowed = []

    def reading(summary, nodes):
        torch.cuda.set_sync_debug_mode("default")
        allowed.append(to_cpu(summary, nodes))
        torch.cuda.set_sync_debug_mode("error")
        return allowed[-1]

    monkeypatch.setattr(decoding, "to_cpu", reading)
    cycles = model.stream(PROMPT, model.options(temperature=1.0, max_new_tokens=60, **sampling))
    next(cycles)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            next(cycles)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(allowed) == 6
