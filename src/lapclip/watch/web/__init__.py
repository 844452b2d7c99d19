"""`lapclip watch --web`: one page on this machine that follows the runs of a folder.

app             its start, and which address answers what
feed            all runs, a line each; and one run as it goes on, read once for all tabs
snapshot        one run as numbers for the charts, whether it learns, and what it answered at each evaluation
static/         the page

What it shares with other pages (address, security, style, plotly.js) is in lapclip.web.
"""

from lapclip.watch.web.app import serve

__all__ = ["serve"]
