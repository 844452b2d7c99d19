"""Models written as other programs want them."""
