"""`python -m torture`, with the folder tests on the path."""

import sys

from torture.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
