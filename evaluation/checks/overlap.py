"""Does a training corpus hold the questions that one measures with? ``python -m evaluation.checks.overlap --help``.

Counts, per question set, the different n-grams of words (lower case, punctuation dropped) of its questions, and how many of them
stand anywhere in the corpus: prompts and answers. A question of fewer than n words is one gram as a whole.
"""

import argparse
import re
import sys
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from eagle.model.demo import DEMO_NAME, demo_target_path
from eagle.model.loading import split_gguf
from eagle.traineagle3.corpus import read_corpus
from evaluation.common.questions import load_questions


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


def ngrams(text: list[str], n: int) -> set[tuple[str, ...]]:
    """All different n-grams of a text; a shorter text is one gram by itself."""
    return {tuple(text[i : i + n]) for i in range(max(len(text) - n, 0) + 1)} if text else set()


def overlap(questions: list[str], corpus: list[list[str]], n: int) -> tuple[int, dict[int, set]]:
    """How many n-grams the questions have together, and which of each question's (by its index) stand in the corpus."""
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


def run(args: argparse.Namespace) -> bool:
    """Print the table; True where an n-gram of the longest kind stands in the corpus."""
    if min(args.n) < 1:
        raise ValueError(f"--n is {args.n}; each must be at least 1")
    path, gguf = split_gguf(
        demo_target_path() if args.base_model_path == DEMO_NAME else args.base_model_path
    )
    tokenizer = AutoTokenizer.from_pretrained(path, **gguf)
    conversations = read_corpus(args.data, len(tokenizer))
    corpus = [
        words(tokenizer.decode(c.ids, skip_special_tokens=True))
        for c in tqdm(conversations, unit="conversation", desc="reading")
    ]
    print(f"{len(conversations)} conversations, {sum(map(len, corpus)):,} words")
    print("| question set | n | different n-grams | in the corpus | questions concerned |")
    print("| --- | --- | --- | --- | --- |")
    longest, hits = max(args.n), False
    for file in args.against:
        questions = ["\n".join(q.turns) for q in load_questions(file)]
        for n in sorted(args.n):
            count, found = overlap(questions, corpus, n)
            shared = len(set().union(*found.values()))
            print(
                f"| {file.parent.name} | {n} | {count:,} | {shared} | {len(found)} of {len(questions)} |"
            )
            hits |= n == longest and shared > 0
            for gram in sorted(set().union(*found.values()))[: args.show]:
                print(f"    {' '.join(gram)}")
    return hits


def main(argv: list[str] | None = None) -> None:
    """Entry point; exit code 1 where the corpus holds an n-gram of the largest n, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.checks.overlap", description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--base-model-path", required=True, help="target, whose tokenizer reads the corpus"
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="corpus files")
    parser.add_argument("--against", type=Path, nargs="+", required=True, help="question files")
    parser.add_argument("--n", type=int, nargs="+", default=[8, 13])
    parser.add_argument("--show", type=int, default=0, help="shared n-grams to print of each set")
    args = parser.parse_args(argv)
    try:
        hits = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if hits else 0)


if __name__ == "__main__":
    main()
