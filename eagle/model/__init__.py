"""Target, draft head, caches and the decoding loop; ``EaModel`` in ``ea_model`` is the entry."""
