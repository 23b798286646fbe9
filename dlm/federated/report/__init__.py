"""What a run guarantees, in words, and measures of it."""
