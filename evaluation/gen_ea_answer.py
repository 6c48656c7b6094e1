"""Answer a question set with speculative decoding: ``python -m evaluation.gen_ea_answer``."""

import argparse
from functools import partial
from pathlib import Path

from eagle.model.ea_model import EaModel
from eagle.program import new_parser, program
from evaluation.common import flags
from evaluation.common.answer_file import read_answers
from evaluation.common.answers import Request, answer_all, describe, run_block
from evaluation.common.prompts import check_template
from evaluation.common.questions import load_questions, question_file


def build_parser(drafting: bool) -> argparse.ArgumentParser:
    """The command line.

    Args:
        drafting: False leaves out the flags that plain decoding does not have.
    """
    name, how = ("gen_ea_answer", "speculative") if drafting else ("gen_baseline_answer", "plain")
    parser = new_parser(
        f"evaluation.{name}",
        f"Answer a question set with {how} decoding.",
    )
    add = parser.add_argument
    target = "target: Hub id, folder, .gguf file, or smollm2-demo"
    head = "EAGLE-3 draft head: Hub id or folder; not needed for smollm2-demo"
    label = "label in the answer file; default: the target's name and the temperature"
    bench = "name of the question set; default: the folder of --question-file, else mt_bench"
    answers = "default: answers/<bench name>/<model id>-<sampling>-seed<seed>.jsonl"
    add("--base-model-path", required=True, help=target)
    if drafting:
        add("--ea-model-path", help=head)
    add("--model-id", help=label)
    add("--bench-name", help=bench)
    add("--question-file", type=Path, help="question file; default: that of --bench-name")
    add("--question-begin", type=int, help="first question, counted from 0")
    add("--question-end", type=int, help="question to stop before")
    add("--answer-file", type=Path, help=answers)
    add("--max-new-token", type=int, default=1024, help="exact cap on the new tokens of a turn")
    add("--num-choices", type=int, default=1, help="answers per question")
    add("--seed", type=int, default=0)
    flags.add_warpers(parser)
    flags.add_model(parser)
    timing = "time the phases of a cycle on a GPU too, which synchronises it"
    add("--timing", action="store_true", help=timing)
    if drafting:
        flags.add_sampling(parser)
        flags.add_tree(parser)
        eagle3 = "accepted for EAGLE's command lines; it is always on"
        add("--use-eagle3", "--use_eagle3", action="store_true", help=eagle3)
    return parser


def answer_file(args: argparse.Namespace, bench: str, model_id: str, pool: dict) -> Path:
    """The answer file that the arguments name, or the default one."""
    sampling = pool["sampling"]
    if sampling == "rheo":
        sampling = f"rheo-m{1 if pool['m'] is None else pool['m']}"
    default = Path("answers", bench, f"{model_id}-{sampling}-seed{args.seed}.jsonl")
    return args.answer_file or default


def resumed_tree(tree: dict, path: Path) -> dict:
    """The sizes of the tree; sizes of -1 are replaced by what the run before chose, if any."""
    if -1 not in tree.values() or not path.exists():
        return tree
    before = read_answers([path], growing=True)
    if not before:
        return tree
    chosen = before[0].get("run") or {}
    return {k: chosen.get(k, value) if value == -1 else value for k, value in tree.items()}


def run(args: argparse.Namespace, drafting: bool) -> Path:
    """Load the models, say what will be done, and answer; returns the answer file."""
    if args.num_choices < 1:
        raise ValueError(f"--num-choices is {args.num_choices}; it must be at least 1")
    bench = args.bench_name or "mt_bench"
    if args.question_file and not args.bench_name:
        bench = args.question_file.absolute().parent.name
    file = args.question_file or question_file(bench)
    questions = load_questions(file, args.question_begin, args.question_end)
    pool = flags.sampling(args) if drafting else {"sampling": "none"}
    model_id = args.model_id or f"{Path(args.base_model_path).name}-temperature-{args.temperature}"
    path = answer_file(args, bench, model_id, pool)
    tree = resumed_tree(flags.tree(args), path) if drafting else {}

    print(f"Loading {args.base_model_path}", flush=True)
    head = {"ea_model_path": args.ea_model_path} if drafting else {}
    model = EaModel.from_pretrained(args.base_model_path, **flags.model(args), **head, **tree)
    check_template(args.template, model.tokenizer)
    options = model.options(
        **flags.warpers(args), **pool, max_new_tokens=args.max_new_token, seed=args.seed
    )
    request = Request(bench, model_id, args.template, args.num_choices, options, args.timing)
    block = run_block(model, request, {"base_model_path": args.base_model_path, **head})
    print(describe(model, request, len(questions), path), flush=True)
    answer_all(model, questions, request, path, block)
    print(f"Done: {path}", flush=True)
    return path


@program(partial(build_parser, drafting=True))
def main(args: argparse.Namespace) -> None:
    """Answer the questions."""
    run(args, drafting=True)


if __name__ == "__main__":
    main()
