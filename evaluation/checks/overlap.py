"""Look for the questions of an evaluation in a training corpus.

Run as ``python -m evaluation.checks.overlap --help``. For each question set it counts the different
n-grams of words in the questions, and how many of them are in the corpus, in prompts or answers.
Words are compared in lower case and without punctuation. A question of fewer than n words is one
gram as a whole.
"""

import argparse
import re
import sys
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from eagle.model.demo import DEMO_NAME, demo_target_path
from eagle.model.loading import split_gguf
from eagle.program import new_parser
from eagle.traineagle3.corpus import read_corpus
from evaluation.common.markdown import table
from evaluation.common.questions import load_questions


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def ngrams(text: list[str], n: int) -> set[tuple[str, ...]]:
    """All different n-grams of a text. A text shorter than n is one gram."""
    return {tuple(text[i : i + n]) for i in range(max(len(text) - n, 0) + 1)} if text else set()


def overlap(questions: list[str], corpus: list[list[str]], n: int) -> tuple[int, dict[int, set]]:
    """Count the n-grams of some questions and look for them in the corpus.

    Returns:
        Number of different n-grams of all questions, and for the index of each question with
        n-grams in the corpus the set of these.
    """
    owners: dict[tuple, list[int]] = {}
    for i, question in enumerate(questions):
        for gram in ngrams(words(question), n):
            owners.setdefault(gram, []).append(i)
    found: dict[int, set] = {}
    lengths = {len(gram) for gram in owners}
    for text in corpus:
        for length in lengths:
            for start in range(len(text) - length + 1):
                gram = tuple(text[start : start + length])
                for i in owners.get(gram, ()):
                    found.setdefault(i, set()).add(gram)
    return len(owners), found


def read_words(base_model_path: str, files: list[Path]) -> list[list[str]]:
    """The words of each conversation of a corpus, decoded with the target's tokenizer."""
    if base_model_path == DEMO_NAME:
        base_model_path = demo_target_path()
    path, gguf = split_gguf(base_model_path)
    tokenizer = AutoTokenizer.from_pretrained(path, **gguf)
    conversations = read_corpus(files, len(tokenizer))
    return [
        words(tokenizer.decode(conversation.ids, skip_special_tokens=True))
        for conversation in tqdm(conversations, unit="conversation", desc="reading")
    ]


def run(args: argparse.Namespace) -> bool:
    """Print the table; True if an n-gram of the largest n is in the corpus."""
    if min(args.n) < 1:
        raise ValueError(f"--n is {args.n}; each must be at least 1")
    corpus = read_words(args.base_model_path, args.data)
    rows, shown, hits = [], [], False
    for file in args.against:
        questions = ["\n".join(question.turns) for question in load_questions(file)]
        for n in sorted(args.n):
            count, found = overlap(questions, corpus, n)
            shared = sorted(set().union(*found.values()))
            concerned = f"{len(found)} of {len(questions)}"
            rows.append((file.parent.name, n, f"{count:,}", len(shared), concerned))
            shown += [f"{file.parent.name}: {' '.join(gram)}" for gram in shared[: args.show]]
            hits |= n == max(args.n) and bool(shared)
    columns = ("question set", "n", "different n-grams", "in the corpus", "questions concerned")
    print(f"{len(corpus)} conversations, {sum(map(len, corpus)):,} words")
    print(table(columns, rows))
    for line in shown:
        print(line)
    return hits


def main(argv: list[str] | None = None) -> None:
    """Exit with status 1 if the corpus holds an n-gram of the largest n, with 2 for bad input."""
    parser = new_parser(
        "evaluation.checks.overlap",
        "Look for the questions of an evaluation in a training corpus.",
        epilog="Exit status: 1 if the corpus holds an n-gram of the largest n, 2 for bad input.",
    )
    add = parser.add_argument
    target = "target whose tokenizer made the corpus"
    add("--base-model-path", required=True, help=target)
    add("--data", type=Path, nargs="+", required=True, help="corpus files")
    add("--against", type=Path, nargs="+", required=True, help="question files")
    add("--n", type=int, nargs="+", default=[8, 13])
    add("--show", type=int, default=0, help="shared n-grams to print for each set and n")
    args = parser.parse_args(argv)
    try:
        hits = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if hits else 0)


if __name__ == "__main__":
    main()
