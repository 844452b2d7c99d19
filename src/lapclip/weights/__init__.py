"""Models that can be loaded: ours, and published ones with OpenAI's, OpenCLIP's and Hugging Face's names.

One file a format, each with its table of names, which reading and writing share. Neither library is needed.
"""

from lapclip.weights.read_model import CONFIG, WEIGHTS, Published, is_model, read_model

__all__ = ["CONFIG", "WEIGHTS", "Published", "is_model", "read_model"]
