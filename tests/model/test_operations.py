"""What a cycle costs around the two networks: operations, host reads, and nothing that waits for data."""

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

LIMIT = 450  # operations a cycle at K 10, depth 7, 60 nodes; m = auto has 85 more
PAIR = {"vocab": 512, "draft_vocab": 256, "layers": 8, "taps": (2, 4, 5)}
SAMPLINGS = [{"sampling": "topk"}, *({"sampling": "rheo", "m": m} for m in (0, 1, 2, AUTO))]


def limit(sampling: dict) -> int:
    return LIMIT + 85 * (sampling.get("m") == AUTO)


def cycle_on_a_device_without_data(
    options: TreeOptions, verification: str, temperature: float, counting=nullcontext()
):
    """All of a cycle but the target's forward, as a GPU runs it, on tensors that have shapes and no values; returns tree and verdict."""
    model = tiny_pair(**PAIR)
    head, embedding, meta = (
        model.draft.to("meta"),
        model.target.embedding.to("meta"),
        torch.device("meta"),
    )
    state, probs, draws = (
        FixedShapeDraftState(head, embedding, 200, options.depth, STEP),
        TargetProbs(WarperOptions(temperature)),
        Draws(None),
    )
    cache = FixedShapeBuffer(2, 2, 4, 300, torch.float32, meta, STEP)
    logits, features = torch.zeros(60, 512, device=meta), torch.zeros(60, 48, device=meta)
    root, target_ids = torch.zeros((), dtype=torch.long, device=meta), head.target_ids()
    with torch.inference_mode():
        state.commit(torch.zeros(5, dtype=torch.long, device=meta), torch.zeros(5, 48, device=meta))
        root_logits = head.logits(state.last)[0]
        with counting:
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
        with pytest.raises(
            (NotImplementedError, RuntimeError)
        ):  # the one read: these tensors would give the alarm
            to_cpu(summary, 60)
    return tree, verified


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_cycle_takes_at_most_450_operations_outside_the_targets_forward(sampling):
    model = tiny_pair(**PAIR, total_token=60, depth=7, top_k=10)
    counting = Operations()
    cycles = model.stream(
        torch.tensor([[3, 1, 2, 3]]), model.options(temperature=1.0, max_new_tokens=60, **sampling)
    )
    next(cycles)  # what is laid out once a request
    with counting, counting.leaving_out(model.target):
        for _ in range(5):
            result = next(cycles)
    accepted = sum(result.accept_lengths[1:6]) / 5 - 1
    operations = counting.counts.total() / 5
    # Each accepted token is one more step of the walk. Under 300 the count itself would be at fault.
    assert 300 < operations <= limit(sampling) - 10 + 60 * accepted, (
        operations,
        accepted,
        counting.counts.most_common(12),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_cycle_of_a_gpu_takes_at_most_450_operations_outside_the_targets_forward(
    sampling, temperature
):
    """There all nodes are decided at once, so that an accepted token costs nothing more."""
    options = TreeOptions(PoolOptions(10, sampling.get("m"), 128, temperature), 60, 7)
    cycle_on_a_device_without_data(options, "rheo", temperature)  # what is laid out once
    counting = Operations()
    cycle_on_a_device_without_data(options, "rheo", temperature, counting)
    assert 300 < counting.counts.total() <= limit(sampling), counting.counts.most_common(12)


@pytest.mark.parametrize("verification", ["rheo", "rrsw"])
@pytest.mark.parametrize("m", [None, 0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_in_a_cycle_waits_for_data(m, verification, temperature):
    """Drafting, tree, verification and commit run on tensors without data: no value is read before the one copy at the end."""
    if m is None and verification == "rrsw":
        return
    tree, verified = cycle_on_a_device_without_data(
        TreeOptions(PoolOptions(10, m, 128, temperature), 60, 7), verification, temperature
    )
    assert tree.tokens.shape == (60,) and verified.tokens.shape == (9,)


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
    cpu = tiny_pair(**PAIR, total_token=60, depth=7, top_k=10)
    model = EaModel(
        cpu.base_model.cuda(), cpu.draft.cuda(), total_token=60, depth=7, top_k=10, cuda_graph=False
    )
    allowed = []

    def reading(summary, nodes):
        torch.cuda.set_sync_debug_mode("default")
        allowed.append(to_cpu(summary, nodes))
        torch.cuda.set_sync_debug_mode("error")
        return allowed[-1]

    monkeypatch.setattr(decoding, "to_host", reading)
    cycles = model.stream(
        torch.tensor([[3, 1, 2, 3]]), model.options(temperature=1.0, max_new_tokens=60, **sampling)
    )
    next(cycles)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            next(cycles)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(allowed) == 6
