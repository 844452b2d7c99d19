"""`python -m lapclip`."""

from lapclip.cli import main

if __name__ == "__main__":
    main()
