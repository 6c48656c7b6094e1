"""Time cycles: ``python -m evaluation.bench --help``."""

from evaluation.speed.bench import main

if __name__ == "__main__":
    main()
