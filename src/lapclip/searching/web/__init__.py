"""`lapclip search FOLDER --web`: one page on this machine that finds the images of a folder.

app             its start and its end, and which address answers what
questions       what can be asked of the library, a page of the answer at a time
images          the images of the index, small and whole, and no other files
static/         the page

What it shares with other pages (address, security, look) is in lapclip.web.
"""
