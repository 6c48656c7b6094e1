"""What a cycle costs, and how the cost grows."""
