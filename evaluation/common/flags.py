"""Command-line flags that several programs share.

Each ``add_...`` function adds some flags to a parser. The function named like it returns their
values as keywords of ``EaModel``.
"""

import argparse

from eagle.model.loading import DTYPE_HELP
from eagle.model.options import SAMPLINGS
from evaluation.common.prompts import TEMPLATES
from rheo import NORMALISERS, VERIFICATIONS, parse_m


def add_warpers(parser: argparse.ArgumentParser) -> None:
    """Add the temperature and the filters of the target's distribution."""
    add = parser.add_argument
    add("--temperature", type=float, default=1.0)
    add("--filter-top-k", type=int, default=0, help="top-k filter of the target; 0 is off")
    add("--filter-top-p", type=float, default=0.0, help="top-p filter of the target; 0 is off")
    add("--filter-min-p", type=float, default=0.0, help="min-p filter of the target; 0 is off")


def warpers(args: argparse.Namespace) -> dict:
    """Temperature and filters as keywords of ``EaModel.options``."""
    return {
        "temperature": args.temperature,
        "top_k": args.filter_top_k,
        "top_p": args.filter_top_p,
        "min_p": args.filter_min_p,
    }


def add_tree(parser: argparse.ArgumentParser, total_token: int = 60, depth: int = 7) -> None:
    """Add the sizes of the draft tree."""
    add, measured = parser.add_argument, "-1 measures this machine and chooses"
    nodes = f"nodes of the tree, the root included; {measured}"
    expansions = f"expansions after the first level; {measured}"
    add("--total-token", type=int, default=total_token, help=nodes)
    add("--depth", type=int, default=depth, help=expansions)
    add("--top-k", type=int, default=10, help="slots of a pool (K)")


def tree(args: argparse.Namespace) -> dict:
    """The sizes of the draft tree as keywords of ``EaModel``."""
    return {"total_token": args.total_token, "depth": args.depth, "top_k": args.top_k}


def add_sampling(parser: argparse.ArgumentParser, sampling: str = "topk") -> None:
    """Add how the draft trees are filled and verified."""
    add = parser.add_argument
    add("--sampling", default=sampling, choices=[s for s in SAMPLINGS if s != "none"])
    lead = "number of lead slots, or auto; for rheo only, where the default is 1"
    support = "draft tokens that carry q, 0 for all; for rheo only, where the default is 128"
    verification = "for rheo only, where the default is rheo"
    normaliser = (
        "whether scores are a softmax over the support or over the full vocabulary; "
        "for rheo only, where the default is support"
    )
    add("--m", type=parse_m, help=lead)
    add("--support", type=int, help=support)
    add("--verification", choices=VERIFICATIONS, help=verification)
    add("--normaliser", choices=NORMALISERS, help=normaliser)


def sampling(args: argparse.Namespace) -> dict:
    """How trees are filled and verified, as keywords of ``EaModel.options``."""
    names = ("sampling", "m", "support", "verification", "normaliser")
    return {name: getattr(args, name) for name in names}


def add_model(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """Add how the target is loaded, and its chat template."""
    add = parser.add_argument
    add("--dtype", default=dtype, help=DTYPE_HELP)
    add("--template", default="auto", choices=TEMPLATES, help="auto is the tokenizer's own")
    no_graph = "on a GPU, run cycles without CUDA graphs, for comparison"
    no_packing = "on a CPU, leave the weights as they were loaded, for comparison"
    add("--no-cuda-graph", action="store_true", help=no_graph)
    add("--no-packed-weights", action="store_true", help=no_packing)


def model(args: argparse.Namespace) -> dict:
    """How the target is loaded, as keywords of ``EaModel.from_pretrained``."""
    return {
        "dtype": args.dtype,
        "cuda_graph": not args.no_cuda_graph,
        "pack_weights": not args.no_packed_weights,
    }
