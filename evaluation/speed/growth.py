"""How the cost of a cycle grows: ``python -m evaluation.speed.growth --base-model-path smollm2-demo``.

Five curves, each over one size with the others at the paper's: the target's forward by tree nodes, drafting by depth and by slots of a
pool, forward and drafting by committed context, and what stands around the networks (pools, tree, verification) by vocabulary, on logits that are
drawn once. Medians of a few rounds.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from eagle.files import replace_text, replacing
from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP
from eagle.model.options import DecodingOptions
from eagle.model.sampling import TargetProbs
from eagle.model.tuning.tree_size import drafting_seconds, verification_seconds
from eagle.program import one_line_errors
from evaluation.speed.bench import circumstances
from rheo import Draws, build_tree, verify

NODES = (8, 16, 32, 60, 128, 256)
DEPTHS = (2, 4, 7, 10, 12)
SLOTS = (4, 8, 10, 16, 32)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
SHORT = 128  # committed context where another size grows
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)


@torch.inference_mode()
def around_seconds(
    options: DecodingOptions, vocab: int, device: torch.device, rounds: int
) -> float:
    """Median seconds of growing and verifying one tree without networks.

    Every draft call answers with the same logits, over the whole vocabulary; the target's law agrees with them.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    logits = 4 * torch.randn(options.top_k, vocab, generator=generator, device=device)
    root, probs, draws = (
        torch.zeros((), dtype=torch.long, device=device),
        TargetProbs(options.warpers),
        Draws(generator),
    )
    at_once = device.type != "cpu"  # as decoding does
    target = logits[0].expand(options.total_token, -1) if at_once else logits[0]
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        tree = build_tree(root, logits[0], lambda tokens, ranks, level: logits, options.tree, draws)
        verify(tree, lambda node: probs(target), draws, at_once=at_once).count.item()
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first is a warm-up


def curves(model: EaModel, rounds: int) -> dict[str, dict]:
    """The five curves by name: the sizes, and milliseconds by series."""
    target, draft = model.target, model.draft
    topk, rheo = (
        model.options(temperature=1.0),
        model.options(temperature=1.0, sampling="rheo", m=1),
    )
    methods = {"Top-K": topk, "Rheo m = 1": rheo}
    longest = getattr(target.config, "max_position_embeddings", None) or max(CONTEXTS)

    def forward(nodes: int, context: int) -> float:
        return median(verification_seconds(target, (nodes,), context, rounds)[nodes])

    def drafting(options: DecodingOptions, context: int = SHORT, **size: int) -> float:
        return drafting_seconds(target, draft, context, replace(options, **size), rounds)

    plan = {
        "tree nodes: forward of the target": (NODES, {"forward": lambda n: forward(n, SHORT)}),
        "depth: drafting": (DEPTHS, {name: lambda n, o=o: drafting(o, depth=n) for name, o in methods.items()}),
        "slots of a pool: drafting": (SLOTS, {name: lambda n, o=o: drafting(o, top_k=n) for name, o in methods.items()}),
        "committed context": (
            tuple(n for n in CONTEXTS if n + topk.total_token <= longest),
            {f"forward of {topk.total_token} nodes": lambda n: forward(topk.total_token, n), "drafting, Rheo m = 1": lambda n: drafting(rheo, n)},
        ),
        "vocabulary: all around the networks": (
            VOCABULARIES, {name: lambda n, o=o: around_seconds(o, n, target.device, rounds) for name, o in methods.items()}
        ),
    }  # fmt: skip
    return {
        name: {
            "x": list(xs),
            "ms": {
                key: [1e3 * measure(x) for x in tqdm(xs, desc=f"{name}, {key}")]
                for key, measure in series.items()
            },
        }
        for name, (xs, series) in plan.items()
    }


def render(found: dict[str, dict]) -> str:
    """The curves as one Markdown table."""
    lines = ["| over | what | size: ms |", "| --- | --- | --- |"]
    for name, data in found.items():
        for key, values in data["ms"].items():
            lines.append(
                f"| {name} | {key} | {', '.join(f'{x:,}: {value:.2f}' for x, value in zip(data['x'], values))} |"
            )
    return "\n".join(lines) + "\n"


def plot(found: dict[str, dict], picture: Path) -> None:
    """One panel a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(12, 6.5), constrained_layout=True)
    for panel, (name, data) in zip(panels.flat, found.items()):
        for key, values in data["ms"].items():
            panel.plot(data["x"], values, marker="o", label=key)
        panel.set_xlabel(name)
        panel.set_ylabel("ms")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    for panel in panels.flat[len(found) :]:
        panel.set_visible(False)
    for suffix in (".svg", ".png"):
        with replacing(picture.with_suffix(suffix)) as scratch:
            figure.savefig(scratch, dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    model = EaModel.from_pretrained(args.base_model_path, args.ea_model_path, dtype=args.dtype)
    if model.draft is None:
        raise ValueError("--ea-model-path is missing: a cycle needs a head")
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1")
    found = curves(model, args.rounds)
    about = circumstances(args, model)
    text = render(found)
    print(text)
    replace_text(
        args.output / "growth.md",
        text + "\n" + ", ".join(f"{k} {v}" for k, v in about.items()) + "\n",
    )
    result = json.dumps({"settings": about, "curves": found})
    replace_text(args.output / "growth.json", result + "\n")
    plot(found, args.output / "growth.svg")
    print(result)


def main(argv: list[str] | None = None) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.speed.growth",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--base-model-path", required=True)
    parser.add_argument("--ea-model-path", help="default: the demo's head")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/growth/demo"))
    parser.add_argument("--dtype", default="auto", help=DTYPE_HELP)
    args = parser.parse_args(argv)
    with one_line_errors():
        run(args)


if __name__ == "__main__":
    main()
