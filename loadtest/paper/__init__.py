"""The evaluation of the DLM paper (section 4), on this machine. Each experiment is a file here with
`run(setup) -> Result`."""
