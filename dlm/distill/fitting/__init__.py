"""The nearest model to counts, on n-grams that are given or inferred."""
