"""The evaluation of the DLM paper (section 4), on the machine that this runs on.

Each experiment is a file here with `run(setup) -> Result`.
"""
