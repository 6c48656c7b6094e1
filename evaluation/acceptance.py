"""Compare methods and draft heads on the same contexts; see ``evaluation.contexts.compare``."""

from evaluation.contexts.compare import main

if __name__ == "__main__":
    main()
