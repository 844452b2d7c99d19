"""The devices of this machine against each other: whole training steps over sizes of model and batch."""
