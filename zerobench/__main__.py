"""`python -m zerobench` is the console script."""

import sys

from zerobench import main

if __name__ == "__main__":
    sys.exit(main())
