"""The parts of a model: words, n-grams, the back-off recursion, and the shard of each context."""
