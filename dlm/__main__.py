"""`python -m dlm`: the command, where it is not on PATH."""

from dlm.cli.main import main

if __name__ == "__main__":
    main()
