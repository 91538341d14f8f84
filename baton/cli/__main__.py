"""`python -m baton.cli`: the `baton` command where no script is installed, as in the images."""

import sys

from baton.cli import main

if __name__ == "__main__":
    sys.exit(main())
