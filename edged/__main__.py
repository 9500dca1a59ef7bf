"""`python -m edged`: the same as the `edged` script."""

from edged.cli import main

if __name__ == "__main__":
    main()
