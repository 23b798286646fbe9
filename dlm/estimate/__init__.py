"""Text becomes an ARPA model; ARPA models become smaller, mixed or those of a vocabulary."""
