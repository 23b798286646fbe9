"""Reports of runs: as JSON, tables, pages and comparisons."""
