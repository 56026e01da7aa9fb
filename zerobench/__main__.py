"""`python -m zerobench` is the console script."""

from zerobench import main

if __name__ == "__main__":
    main()
