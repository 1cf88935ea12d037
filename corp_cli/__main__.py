"""`python -m corp_cli` is `corp`."""

import sys

from corp_cli.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
