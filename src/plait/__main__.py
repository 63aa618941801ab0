"""`python -m plait`, which torchrun can start: the command line."""

from plait.cli import main

if __name__ == "__main__":
    main()
