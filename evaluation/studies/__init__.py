"""Studies that were made once, for the documents."""
