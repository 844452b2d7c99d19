"""Training: the step, the loop around it, the optimiser and the checkpoints."""
