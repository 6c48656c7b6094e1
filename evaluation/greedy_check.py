"""Compare greedy decoding with the target's own; see ``evaluation.checks.greedy``."""

from evaluation.checks.greedy import main

if __name__ == "__main__":
    main()
