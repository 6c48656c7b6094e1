"""What all experiments on the paper's pairs share: their flags, questions, folders and settings."""

import argparse
from dataclasses import replace
from pathlib import Path

from eagle.model.ea_model import EaModel
from eagle.model.loading import DTYPE_HELP
from eagle.program import new_parser
from evaluation.common.prompts import check_template
from evaluation.common.questions import Question, load_questions, question_file
from evaluation.common.run_info import device_name, dtype_name, git_revision
from evaluation.paper.grids import BENCHES, PAIRS, Experiment, Pair


def study_parser(
    program: str, description: str, max_new_token: int, benches: str, seeds: str
) -> argparse.ArgumentParser:
    """A parser with the flags that every experiment on one of the paper's pairs takes.

    Args:
        program: module that ``python -m`` runs.
        description: one sentence for the help.
        max_new_token: default of this flag.
        benches: in words, which question sets are the default, for the help.
        seeds: in words, which seeds are the default, for the help.
    """
    parser = new_parser(
        program,
        description,
        allow_abbrev=False,  # --seed must not be taken for --seeds
    )
    add = parser.add_argument
    add("--pair", default="llama31-8b", choices=PAIRS)
    add("--dtype", help=f"default: the pair's; {DTYPE_HELP}")
    add("--bench-name", nargs="+", choices=BENCHES, help=f"default: {benches}")
    add("--limit", type=int, help="questions of each set; default: all 80")
    add("--max-new-token", type=int, default=max_new_token, help="cap on the tokens of a turn")
    add("--seeds", type=int, help=f"number of seeds, from 0 on; default: {seeds}")
    add("--results", type=Path, default=Path("results"), help="folder of all results")
    return parser


def check_counts(args: argparse.Namespace, *more: str) -> None:
    """Raise a ValueError if a number is given that leaves nothing to do.

    Args:
        args: the parsed arguments.
        more: numbers that must be at least 1, besides ``limit`` and ``seeds``.
    """
    for name in ("limit", "seeds", *more):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")


def chosen_pair(args: argparse.Namespace) -> Pair:
    """The pair, in the dtype that the arguments ask for."""
    pair = PAIRS[args.pair]
    return pair if args.dtype is None else replace(pair, dtype=args.dtype)


def load_pair(args: argparse.Namespace, experiment: Experiment) -> EaModel:
    """The pair of the arguments, loaded with the tree sizes of an experiment."""
    pair = chosen_pair(args)
    model = EaModel.from_pretrained(
        pair.base_model_path, pair.ea_model_path, *experiment.tree, dtype=pair.dtype
    )
    check_template(pair.template, model.tokenizer)
    return model


def chosen_questions(args: argparse.Namespace, experiment: Experiment) -> dict[str, list[Question]]:
    """By bench, the questions that the arguments ask for; by default all of the experiment."""
    benches = args.bench_name or experiment.benches
    return {bench: load_questions(question_file(bench), None, args.limit) for bench in benches}


def study_folder(args: argparse.Namespace, name: str) -> Path:
    """Folder of the answers and tables of an experiment.

    Settings that change all answers are part of the path: pair, dtype (if it is not the pair's
    own) and the cap on new tokens.
    """
    own_dtype = args.dtype in (None, PAIRS[args.pair].dtype)
    pair = args.pair if own_dtype else f"{args.pair}-{args.dtype}"
    return args.results / name / pair / f"cap{args.max_new_token}"


def study_settings(args: argparse.Namespace, model: EaModel, seeds: int) -> dict:
    """The settings of a table that was measured along the target's own answers."""
    options = model.options()
    return {
        "pair": args.pair,
        "limit": args.limit or "all",
        "max_new_token": args.max_new_token,
        "seeds": seeds,
        "total_token": options.total_token,
        "depth": options.depth,
        "top_k": options.tree.pool.size,
        "dtype": dtype_name(model.target.dtype),
        "head": model.draft.fingerprint,
        "device": device_name(model.target.device),
        "commit": git_revision(),
    }
