"""KenLM's binary files: read and scored as they lie, and turned back into n-grams."""
