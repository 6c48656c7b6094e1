"""Command-line flags that several programs share, each with one meaning, and what they say as keywords of ``EaModel``."""

import argparse
from dataclasses import replace
from pathlib import Path

from eagle.model.decoding import SAMPLINGS
from eagle.model.target import DTYPE_HELP
from evaluation.grids import PAIRS, Pair
from evaluation.prompts import TEMPLATES
from rheo import VERIFICATIONS, parse_m


def add_law(parser: argparse.ArgumentParser) -> None:
    """Temperature and filters of the target (see ``law``)."""
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--filter-top-k", type=int, default=0, help="the target's top-k filter; 0 is off")
    parser.add_argument("--filter-top-p", type=float, default=0.0, help="the target's nucleus; 0 is off")
    parser.add_argument("--filter-min-p", type=float, default=0.0, help="the target's min-p filter; 0 is off")


def law(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel.options``."""
    return {"temperature": args.temperature, "top_k": args.filter_top_k, "top_p": args.filter_top_p, "min_p": args.filter_min_p}


def add_tree(parser: argparse.ArgumentParser, total_token: int = 60, depth: int = 7) -> None:
    """Size of the draft tree (see ``tree``)."""
    parser.add_argument("--total-token", type=int, default=total_token, help="tree nodes, the root included; -1 measures and chooses")
    parser.add_argument("--depth", type=int, default=depth, help="expansions after the first level; -1 measures and chooses")
    parser.add_argument("--top-k", type=int, default=10, help="slots of a pool (the tree's K)")


def tree(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel``."""
    return {"total_token": args.total_token, "depth": args.depth, "top_k": args.top_k}


def add_sampling(parser: argparse.ArgumentParser, sampling: str = "topk") -> None:
    """How trees are filled and verified (see ``sampling``)."""
    parser.add_argument("--sampling", default=sampling, choices=[s for s in SAMPLINGS if s != "none"])
    parser.add_argument("--m", type=parse_m, help="lead slots before the sampled one, or auto (rheo; 1 where not given)")
    parser.add_argument("--support", type=int, help="draft tokens that carry q, 0 for all (rheo; 128 where not given)")
    parser.add_argument("--verification", choices=VERIFICATIONS, help="(rheo; rheo where not given)")


def sampling(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel.options``."""
    return {name: getattr(args, name) for name in ("sampling", "m", "support", "verification")}


def add_model(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """How the target is loaded (see ``model``) and spoken to."""
    parser.add_argument("--dtype", default=dtype, help=DTYPE_HELP)
    parser.add_argument("--template", default="auto", choices=TEMPLATES, help="auto is the tokenizer's own")
    parser.add_argument("--no-cuda-graph", action="store_true", help="on a GPU, run cycles operation by operation, to compare")


def model(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel.from_pretrained``."""
    return {"dtype": args.dtype, "cuda_graph": not args.no_cuda_graph}


def add_pair(parser: argparse.ArgumentParser) -> None:
    """One of the paper's pairs (see ``pair``)."""
    parser.add_argument("--pair", default="llama31-8b", choices=PAIRS)
    parser.add_argument("--dtype", help=f"default: the pair's; {DTYPE_HELP}")


def pair(args: argparse.Namespace) -> Pair:
    """The pair, in the dtype asked for."""
    return PAIRS[args.pair] if args.dtype is None else replace(PAIRS[args.pair], dtype=args.dtype)


def pair_folder(args: argparse.Namespace) -> str:
    """The pair's part of the path of results: its name, and the dtype where that is not the pair's own."""
    return args.pair if args.dtype is None else f"{args.pair}-{args.dtype}"


def add_study(parser: argparse.ArgumentParser, max_new_token: int) -> None:
    """What a study of one of the paper's pairs along answers of its target needs."""
    add_pair(parser)
    parser.add_argument("--bench-name", default="mt_bench")
    parser.add_argument("--limit", type=int, help="questions; default: all")
    parser.add_argument("--max-new-token", type=int, default=max_new_token, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("results"))
