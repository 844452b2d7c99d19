"""What is in a data set before anything is trained on it: what is odd about its images and captions."""
