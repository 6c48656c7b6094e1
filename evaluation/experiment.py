"""Run one of the paper's experiments: ``python -m evaluation.experiment --help``."""

from evaluation.paper.experiment import main

if __name__ == "__main__":
    main()
