"""Local pages in a browser: what `watch --web` and `search --web` share.

server          the address, the port and the end by Ctrl-C; the files that pages load, and plotly.js
connections     how many there may be, and how long one may take to ask
security        who may ask: Host, Origin, token, and what a browser may do with the answer
static/         the style, and the making of elements, that all pages have in common
"""
