"""Text becomes an ARPA file; ARPA files become smaller, mixed and judged ones."""
