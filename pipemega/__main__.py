"""`python -m pipemega`."""

import sys

from pipemega.cli import main

if __name__ == "__main__":
    sys.exit(main())
