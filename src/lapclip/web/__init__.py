"""Local pages in a browser: what `watch --web` and `search --web` share.

server          the address, the port and the end by Ctrl-C; the files that pages load, and plotly.js
security        who may ask: Host, Origin, token; what a browser may do with the answer; how many connections there may
                be, and how long one may take to ask
static/         the style, and the making of elements, that all pages have in common
"""
