"""`lapclip watch --web`: one page on this machine that follows the runs of a folder.

server          the address, the port and the end by Ctrl-C
application     which address answers what
security        who may ask: Host, Origin, token, and what a browser may do with the answer
listing         all runs, a line each
feed            one run as it goes on, read once for all tabs
snapshot        one run as figures for the charts
learning        whether it learns, in words, and what it answered at each evaluation
assets          the page's own files, and plotly.js
static/         the page
"""

from lapclip.watch.web.server import serve

__all__ = ["serve"]
