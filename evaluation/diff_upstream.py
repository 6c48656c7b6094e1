"""Compare this project with a checkout of EAGLE; see ``evaluation.upstream.diff``."""

from evaluation.upstream.diff import main

if __name__ == "__main__":
    main()
