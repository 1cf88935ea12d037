"""`python -m corp_cli` is `corp`."""

from corp_cli.cli.main import program

if __name__ == "__main__":
    program()
