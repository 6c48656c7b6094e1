"""Measure how cost grows: ``python -m evaluation.speed.growth --base-model-path smollm2-demo``.

There are five curves. Each varies one size and keeps the others at the paper's values: the target's
forward by tree nodes, drafting by depth and by slots of a pool, forward and drafting by committed
context, and the work outside the networks (pools, tree, verification) by vocabulary, on random
logits. Values are medians of a few rounds.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.model.tuning.tree_size import drafting_seconds, verification_seconds
from eagle.plotting import saved_plot
from eagle.program import new_parser, program
from evaluation.common.markdown import table
from evaluation.speed.bench import circumstances, write_report
from rheo import Draws, build_tree, verify

NODES = (8, 16, 32, 60, 128, 256)
DEPTHS = (2, 4, 7, 10, 12)
SLOTS = (4, 8, 10, 16, 32)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
SHORT = 128  # committed context of the curves that vary another size
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)


@torch.inference_mode()
def outside_seconds(
    options: DecodingOptions, vocab: int, device: torch.device, rounds: int
) -> float:
    """Median seconds of building and verifying one tree without running the networks.

    Every draft call returns the same random logits over the whole vocabulary. The target agrees
    with the draft head.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    logits = 4 * torch.randn(options.tree_top_k, vocab, generator=generator, device=device)
    root = torch.zeros((), dtype=torch.long, device=device)
    probs, draws = TargetProbs(options.warpers), Draws(generator)
    at_once = device.type != "cpu"  # as in decoding
    target = logits[0].expand(options.total_token, -1) if at_once else logits[0]
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        tree = build_tree(root, logits[0], lambda tokens, ranks, level: logits, options.tree, draws)
        verify(tree, lambda node: probs(target), draws, at_once=at_once).count.item()
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first is a warm-up


def curves(model: EaModel, rounds: int) -> dict[str, dict]:
    """The five curves by name.

    Returns:
        For each name the sizes as ``x``, and as ``ms`` the milliseconds of each series.
    """
    target, draft = model.target, model.draft
    topk = model.options(temperature=1.0)
    rheo = model.options(temperature=1.0, sampling="rheo", m=1)
    nodes = topk.total_token
    longest = getattr(target.config, "max_position_embeddings", None) or max(CONTEXTS)
    contexts = tuple(size for size in CONTEXTS if size + nodes <= longest)

    def forward(nodes: int, context: int) -> float:
        return median(verification_seconds(target, (nodes,), context, rounds)[nodes])

    def drafting(options: DecodingOptions, context: int = SHORT) -> float:
        return drafting_seconds(target, draft, context, options, rounds)

    def by_depth(options: DecodingOptions, depth: int) -> float:
        return drafting(replace(options, depth=depth))

    def by_slots(options: DecodingOptions, slots: int) -> float:
        return drafting(replace(options, tree_top_k=slots))

    def by_vocabulary(options: DecodingOptions, vocab: int) -> float:
        return outside_seconds(options, vocab, target.device, rounds)

    def methods(seconds: Callable[[DecodingOptions, int], float]) -> dict[str, Callable]:
        return {"Top-K": partial(seconds, topk), "Rheo m = 1": partial(seconds, rheo)}

    in_context = {
        f"forward of {nodes} nodes": partial(forward, nodes),
        "drafting, Rheo m = 1": partial(drafting, rheo),
    }
    plan = {
        "tree nodes: forward of the target": (NODES, {"forward": lambda n: forward(n, SHORT)}),
        "depth: drafting": (DEPTHS, methods(by_depth)),
        "slots of a pool: drafting": (SLOTS, methods(by_slots)),
        "committed context": (contexts, in_context),
        "vocabulary: all around the networks": (VOCABULARIES, methods(by_vocabulary)),
    }
    found = {}
    for name, (sizes, series) in plan.items():
        ms = {
            key: [1e3 * seconds(size) for size in tqdm(sizes, desc=f"{name}, {key}")]
            for key, seconds in series.items()
        }
        found[name] = {"x": list(sizes), "ms": ms}
    return found


def render(found: dict[str, dict]) -> str:
    """The curves as one Markdown table."""
    rows = [
        (name, key, ", ".join(f"{x:,}: {value:.2f}" for x, value in zip(data["x"], values)))
        for name, data in found.items()
        for key, values in data["ms"].items()
    ]
    return table(("over", "what", "size: ms"), rows) + "\n"


def plot(found: dict[str, dict], path: Path) -> None:
    """Plot the curves, one panel each."""
    with saved_plot(path, 2, 3, figsize=(12, 6.5)) as (_, panels):
        for panel, (name, data) in zip(panels.flat, found.items()):
            for key, values in data["ms"].items():
                panel.plot(data["x"], values, marker="o", label=key)
            panel.set(xlabel=name, ylabel="ms")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.legend(frameon=False)
        for panel in panels.flat[len(found) :]:
            panel.set_visible(False)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = new_parser(
        "evaluation.speed.growth",
        "Measure how the cost of a cycle grows.",
    )
    add = parser.add_argument
    add("--base-model-path", required=True)
    add("--ea-model-path", help="default: the demo's draft head")
    add("--rounds", type=int, default=5)
    add("--output", type=Path, default=Path("results/growth/demo"), help="folder")
    add("--dtype", default="auto", help=DTYPE_HELP)
    return parser


@program(build_parser)
def main(args: argparse.Namespace) -> None:
    """Measure, print the table, and write table, values and plot."""
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1")
    model = EaModel.from_pretrained(
        base_model_path=args.base_model_path, ea_model_path=args.ea_model_path, dtype=args.dtype
    )
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: a cycle needs a draft head")
    found = curves(model, args.rounds)
    settings = circumstances(args, model)
    text, result = render(found), json.dumps({"settings": settings, "curves": found})
    print(text)
    write_report(args.output, "growth", text, settings, result)
    plot(found, args.output / "growth.png")
    print(result)


if __name__ == "__main__":
    main()
