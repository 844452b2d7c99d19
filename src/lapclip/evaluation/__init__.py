"""Evaluation: how well a model finds pictures by captions, and captions by pictures."""
