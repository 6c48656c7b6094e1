"""Fetch the question sets: ``python -m evaluation.questions --help``."""

from evaluation.common.questions import main

if __name__ == "__main__":
    main()
