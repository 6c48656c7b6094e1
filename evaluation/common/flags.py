"""Command-line flags that several programs share, each with one meaning, and what they say as keywords of ``EaModel``."""

import argparse
from dataclasses import replace
from pathlib import Path

from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP
from eagle.model.options import SAMPLINGS
from evaluation.common.answers import commit, device_name
from evaluation.common.prompts import TEMPLATES
from evaluation.common.questions import Question, load_questions, question_file
from evaluation.paper.grids import BENCHES, PAIRS, Pair
from rheo import NORMALISERS, VERIFICATIONS, parse_m


def add_warpers(parser: argparse.ArgumentParser) -> None:
    """Temperature and filters of the target (see ``probs``)."""
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--filter-top-k", type=int, default=0, help="the target's top-k filter; 0 is off"
    )
    parser.add_argument(
        "--filter-top-p", type=float, default=0.0, help="the target's nucleus; 0 is off"
    )
    parser.add_argument(
        "--filter-min-p", type=float, default=0.0, help="the target's min-p filter; 0 is off"
    )


def warpers(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel.options``."""
    return {
        "temperature": args.temperature,
        "top_k": args.filter_top_k,
        "top_p": args.filter_top_p,
        "min_p": args.filter_min_p,
    }


def add_tree(parser: argparse.ArgumentParser, total_token: int = 60, depth: int = 7) -> None:
    """Size of the draft tree (see ``tree``)."""
    parser.add_argument(
        "--total-token",
        type=int,
        default=total_token,
        help="tree nodes, the root included; -1 measures and chooses",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=depth,
        help="expansions after the first level; -1 measures and chooses",
    )
    parser.add_argument("--top-k", type=int, default=10, help="slots of a pool (the tree's K)")


def tree(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel``."""
    return {"total_token": args.total_token, "depth": args.depth, "top_k": args.top_k}


def add_sampling(parser: argparse.ArgumentParser, sampling: str = "topk") -> None:
    """How trees are filled and verified (see ``sampling``)."""
    parser.add_argument(
        "--sampling", default=sampling, choices=[s for s in SAMPLINGS if s != "none"]
    )
    parser.add_argument(
        "--m",
        type=parse_m,
        help="lead slots before the sampled one, or auto (rheo; 1 where not given)",
    )
    parser.add_argument(
        "--support",
        type=int,
        help="draft tokens that carry q, 0 for all (rheo; 128 where not given)",
    )
    parser.add_argument(
        "--verification", choices=VERIFICATIONS, help="(rheo; rheo where not given)"
    )
    parser.add_argument(
        "--normaliser",
        choices=NORMALISERS,
        help="of the scores: the softmax over the support, or over all (rheo; support where not given)",
    )


def sampling(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel.options``."""
    return {
        name: getattr(args, name)
        for name in ("sampling", "m", "support", "verification", "normaliser")
    }


def add_model(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """How the target is loaded (see ``model``) and spoken to."""
    parser.add_argument("--dtype", default=dtype, help=DTYPE_HELP)
    parser.add_argument(
        "--template", default="auto", choices=TEMPLATES, help="auto is the tokenizer's own"
    )
    parser.add_argument(
        "--no-cuda-graph",
        action="store_true",
        help="on a GPU, run cycles operation by operation, to compare",
    )
    parser.add_argument(
        "--no-packed-weights",
        action="store_true",
        help="on a CPU, leave the weights as they were loaded, to compare",
    )


def model(args: argparse.Namespace) -> dict:
    """Keywords of ``EaModel.from_pretrained``."""
    return {
        "dtype": args.dtype,
        "cuda_graph": not args.no_cuda_graph,
        "pack_weights": not args.no_packed_weights,
    }


def add_pair(parser: argparse.ArgumentParser) -> None:
    """One of the paper's pairs (see ``pair``)."""
    parser.add_argument("--pair", default="llama31-8b", choices=PAIRS)
    parser.add_argument("--dtype", help=f"default: the pair's; {DTYPE_HELP}")


def pair(args: argparse.Namespace) -> Pair:
    """The pair, in the dtype asked for."""
    return PAIRS[args.pair] if args.dtype is None else replace(PAIRS[args.pair], dtype=args.dtype)


def pair_folder(args: argparse.Namespace) -> str:
    """The pair's part of the path of results: its name, and the dtype where that is not the pair's own."""
    return (
        args.pair if args.dtype in (None, PAIRS[args.pair].dtype) else f"{args.pair}-{args.dtype}"
    )


def add_study(
    parser: argparse.ArgumentParser, max_new_token: int, benches: str, seeds: str
) -> None:
    """What every experiment on one of the paper's pairs takes, and what says where its results lie (see ``study_folder``).

    Args:
        benches, seeds: what is taken where they are not given, for the help.
    """
    add_pair(parser)
    parser.add_argument("--bench-name", nargs="+", choices=BENCHES, help=f"default: {benches}")
    parser.add_argument("--limit", type=int, help="questions of each set; default: all 80")
    parser.add_argument(
        "--max-new-token", type=int, default=max_new_token, help="tokens of each answer"
    )
    parser.add_argument("--seeds", type=int, help=f"seeds 0 to N-1; default: {seeds}")
    parser.add_argument("--results", type=Path, default=Path("results"))


def check_study(args: argparse.Namespace) -> None:
    """Raise a ValueError for a number that leaves nothing to do."""
    for name in ("limit", "seeds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")


def study_questions(
    args: argparse.Namespace, benches: tuple[str, ...]
) -> dict[str, list[Question]]:
    """By bench the questions asked for.

    Args:
        benches: those that are taken where none is given.
    """
    return {
        bench: load_questions(question_file(bench), None, args.limit)
        for bench in args.bench_name or benches
    }


def study_folder(args: argparse.Namespace, name: str) -> Path:
    """Where the answers and tables of an experiment lie; what changes all of them is in the path."""
    return args.results / name / pair_folder(args) / f"cap{args.max_new_token}"


def study_settings(args: argparse.Namespace, model: EaModel, seeds: int) -> dict:
    """What made a table along answers of the target, for the table to carry."""
    given = {
        "pair": args.pair,
        "limit": args.limit or "all",
        "max_new_token": args.max_new_token,
        "seeds": seeds,
    }
    tree = {name: model.tree_defaults[name] for name in ("total_token", "depth", "top_k")}
    dtype = str(model.target.dtype).removeprefix("torch.")
    return (
        given
        | tree
        | {
            "dtype": dtype,
            "head": model.draft.fingerprint,
            "device": device_name(model.target.device),
            "commit": commit(),
        }
    )
