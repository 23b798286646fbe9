"""Numbers as text, in as few digits as tell them apart."""
