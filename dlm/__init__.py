"""dlm: n-gram language models served from many machines, exactly."""

__version__ = "0.1.0"
