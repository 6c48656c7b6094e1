"""Compare with a checkout of EAGLE: ``python -m evaluation.diff_upstream --help``."""

from evaluation.upstream.diff import main

if __name__ == "__main__":
    main()
