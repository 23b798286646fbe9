"""What does not fit in memory: rows sorted and columns kept on disk, within a limit of memory."""
