"""The command `dlm`: one file a group of commands; the only place that prints and exits."""
