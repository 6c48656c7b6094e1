"""RheoSampling inside a checkout of EAGLE: ``python -m rheo.upstream PATH_TO_EAGLE -- ...``.

See ``rheo.integrations.eagle``.
"""

from rheo.integrations.eagle import enable, main

__all__ = ["enable", "main"]

if __name__ == "__main__":
    main()
