"""Numbers and rows as the text of an ARPA file."""
