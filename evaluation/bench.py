"""Time the cycles of a pair; see ``evaluation.speed.bench``."""

from evaluation.speed.bench import main

if __name__ == "__main__":
    main()
