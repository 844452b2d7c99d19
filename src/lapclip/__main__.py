"""`python -m lapclip`."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[
            0
        ]  # where -m puts the current folder: a random.py in it would be taken for Python's own

    from lapclip.cli import main

    main()
