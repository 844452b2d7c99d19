"""Local pages in a browser: what `watch --web` and `search --web` share.

server          the address, the port and the end by Ctrl-C
security        who may ask: Host, Origin, token, and what a browser may do with the answer
assets          the files that pages load, and plotly.js
static/         the style, and the making of elements, that all pages have in common
"""
