"""Language models for decoders of others, and a beam search over letters."""
