"""One-off studies behind the documents."""
