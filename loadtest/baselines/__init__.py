"""The systems that the paper compares with DLM."""
