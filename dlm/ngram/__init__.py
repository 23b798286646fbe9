"""What a model is: words, n-grams, the back-off recursion, and which shard owns a context."""
