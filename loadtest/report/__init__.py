"""What a run measured: its report as JSON, tables, pages and comparisons."""
