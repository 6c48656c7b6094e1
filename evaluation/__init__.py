"""Programs that answer questions, run experiments, and compare and check the results."""
