"""Answer a question set with plain decoding: ``python -m evaluation.gen_baseline_answer --help``."""

from evaluation.gen_ea_answer import main

if __name__ == "__main__":
    main(drafting=False)
