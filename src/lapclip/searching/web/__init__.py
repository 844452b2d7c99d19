"""`lapclip search FOLDER --web`: one page on this machine that finds the images of a folder.

server          what it says at its start, and its end
app             which address answers what
questions       what can be asked of the library, a page of the answer at a time
images          the images of the index, small and whole, and no other files
static/         the page

What it shares with other pages (address, security, look) is in lapclip.web.
"""

from lapclip.searching.web.server import serve

__all__ = ["serve"]
