"""The evaluation of the DLM paper (section 4), on this machine."""
