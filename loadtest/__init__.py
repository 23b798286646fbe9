"""Load tests of a dlm cluster from recorded traces of decoders; run as `python -m loadtest`."""
