"""`lapclip watch --web`: one page on this machine that follows the runs of a folder.

server          what it says at its start, and its end
application     which address answers what
listing         all runs, a line each
feed            one run as it goes on, read once for all tabs
snapshot        one run as figures for the charts
learning        whether it learns, in words, and what it answered at each evaluation
assets          the page itself, and plotly.js
static/         the page

What it shares with other pages (address, security, look) is in lapclip.serving.
"""

from lapclip.watch.web.server import serve

__all__ = ["serve"]
