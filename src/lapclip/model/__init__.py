"""The model: a transformer block, two towers, and CLIP made of them."""
