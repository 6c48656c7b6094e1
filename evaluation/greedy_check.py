"""Compare greedy decoding with the target's own: ``python -m evaluation.greedy_check --help``."""

from evaluation.checks.greedy import main

if __name__ == "__main__":
    main()
