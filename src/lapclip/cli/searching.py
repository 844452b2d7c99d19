"""`lapclip search`."""
