"""Compare methods and heads on the same contexts: ``python -m evaluation.acceptance --help``."""

from evaluation.contexts.compare import main

if __name__ == "__main__":
    main()
