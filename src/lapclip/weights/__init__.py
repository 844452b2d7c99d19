"""Models that can be loaded: ours, and published ones with OpenAI's, OpenCLIP's and Hugging Face's names.

One file a format, each with its table of names, which reading and writing share. Neither library is needed.
`recognise` says what is a model without opening it; `read_model` reads it.
"""
