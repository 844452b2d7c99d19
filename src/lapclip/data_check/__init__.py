"""What is in a data set before anything is trained on it: what is odd, what it will cost, and how it looks."""
