"""What the programs share: answer files, flags, prompts, questions, statistics."""
