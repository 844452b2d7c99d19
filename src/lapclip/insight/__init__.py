"""What a run's events mean. No torch."""
