"""N-gram language models behind the interfaces that speech recognisers already call."""
