"""`lapclip serve`: a model behind HTTP, in the dialects that clients already speak."""
