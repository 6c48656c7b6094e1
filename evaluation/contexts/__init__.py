"""Methods and draft heads compared on the same contexts."""
