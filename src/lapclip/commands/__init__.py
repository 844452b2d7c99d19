"""What each command does, without printing."""
