"""The command `dlm`, one file per group of commands. Only this package prints and exits."""
