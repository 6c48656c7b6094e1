"""Answer a question set with speculative decoding: ``python -m evaluation.gen_ea_answer --help``."""

import argparse
from pathlib import Path

from eagle.model.ea_model import EaModel
from eagle.program import one_line_errors
from evaluation.common import flags
from evaluation.common.answers import Request, answer_all, describe, read_answers, run_block
from evaluation.common.prompts import check_template
from evaluation.common.questions import load_questions, question_file


def build_parser(drafting: bool) -> argparse.ArgumentParser:
    """The command line; ``drafting=False`` leaves out what plain decoding does not have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m evaluation.{'gen_ea_answer' if drafting else 'gen_baseline_answer'}",
        description="Answer a question set with speculative decoding."
        if drafting
        else "Answer a question set with plain decoding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--base-model-path",
        required=True,
        help="target: Hub id, folder, .gguf file, or smollm2-demo",
    )
    if drafting:
        add("--ea-model-path", help="EAGLE-3 head: Hub id or folder (smollm2-demo brings its own)")
    add(
        "--model-id",
        help="label in the answer file; default: the target's name and the temperature",
    )
    add(
        "--bench-name",
        help="name of the question set; default: the folder of --question-file, else mt_bench",
    )
    add("--question-file", type=Path, help="question file; default: the one of --bench-name")
    add("--question-begin", type=int, help="first question, counted from 0")
    add("--question-end", type=int, help="end of the questions, not included")
    add(
        "--answer-file",
        type=Path,
        help="default: answers/<bench name>/<model id>-<sampling>-seed<seed>.jsonl",
    )
    add("--max-new-token", type=int, default=1024, help="exact cap on new tokens a turn")
    add("--num-choices", type=int, default=1, help="answers per question")
    add("--seed", type=int, default=0)
    flags.add_warpers(parser)
    flags.add_model(parser)
    add(
        "--timing",
        action="store_true",
        help="record seconds per phase on a GPU too (synchronises it)",
    )
    if drafting:
        flags.add_sampling(parser)
        flags.add_tree(parser)
        add(
            "--use-eagle3",
            action="store_true",
            help="accepted for EAGLE's command lines; always on",
        )
    return parser


def run(args: argparse.Namespace, drafting: bool) -> Path:
    """Load, echo, answer; returns the answer file."""
    if args.num_choices < 1:
        raise ValueError(f"--num-choices is {args.num_choices}; it must be at least 1")
    bench = args.bench_name or (
        args.question_file.absolute().parent.name if args.question_file else "mt_bench"
    )
    questions = load_questions(
        args.question_file or question_file(bench), args.question_begin, args.question_end
    )
    tree = flags.tree(args) if drafting else {}
    pool = flags.sampling(args) if drafting else {"sampling": "none"}

    model_id = args.model_id or f"{Path(args.base_model_path).name}-temperature-{args.temperature}"
    sampling = (
        pool["sampling"]
        if pool["sampling"] != "rheo"
        else f"rheo-m{1 if pool['m'] is None else pool['m']}"
    )
    path = args.answer_file or Path(
        "answers", bench, f"{model_id}-{sampling}-seed{args.seed}.jsonl"
    )
    if -1 in tree.values() and path.exists() and (before := read_answers([path])):
        tree |= {
            name: before[0]["run"][name] for name in ("total_token", "depth") if tree[name] == -1
        }  # a run goes on with what it chose

    print(f"Loading {args.base_model_path}", flush=True)
    heads = {"ea_model_path": args.ea_model_path} if drafting else {}
    model = EaModel.from_pretrained(args.base_model_path, **flags.model(args), **heads, **tree)
    check_template(args.template, model.tokenizer)
    options = model.options(
        **flags.warpers(args), **pool, max_new_tokens=args.max_new_token, seed=args.seed
    )
    request = Request(bench, model_id, args.template, args.num_choices, options, args.timing)
    paths = {"base_model_path": args.base_model_path, **heads}
    print(describe(model, request, len(questions), path), flush=True)
    answer_all(model, questions, request, path, run_block(model, request, paths))
    print(f"Done: {path}", flush=True)
    return path


def main(argv: list[str] | None = None, drafting: bool = True) -> None:
    """Entry point; bad input ends with one line, not a traceback."""
    parser = build_parser(drafting)
    args = parser.parse_args(argv)
    with one_line_errors():
        run(args, drafting)


if __name__ == "__main__":
    main()
