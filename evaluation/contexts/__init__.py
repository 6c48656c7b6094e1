"""Methods and heads compared on the same contexts."""
