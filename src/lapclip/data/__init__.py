"""The data: images with captions, from where they are to the batch the model sees."""
