"""Target, draft head, caches and the decoding loop; ``eagle.model.ea_model.EaModel`` is the entry point."""
