"""`python -m tunesmith` is the `tunesmith` command."""

from tunesmith.cli.main import entry

if __name__ == "__main__":
    entry()
