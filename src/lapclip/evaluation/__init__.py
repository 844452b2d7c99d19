"""Evaluation: how well a model finds images by captions, and captions by images."""
