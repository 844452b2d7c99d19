"""Networks that others have trained as towers: run in two parts, with a head of our own."""
