"""`python -m dlm`: runs the command when it is not on PATH."""

from dlm.cli.main import main

if __name__ == "__main__":
    main()
