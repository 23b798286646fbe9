"""Language models for other projects' decoders, and a beam search over letters."""
