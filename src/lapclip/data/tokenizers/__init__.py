"""Captions to tokens and back: a token a character, a BPE learnt from the captions, or CLIP's own BPE."""

from lapclip.data.tokenizers.bpe import BytePairTokenizer, clip_tokenizer
from lapclip.data.tokenizers.choose import choose_tokenizer, load_tokenizer, save_tokenizer, tokenizer_from_dict
from lapclip.data.tokenizers.tokenizer import LENGTH_STEP, CharacterTokenizer, Tokenizer, pad

__all__ = [
    "LENGTH_STEP",
    "BytePairTokenizer",
    "CharacterTokenizer",
    "Tokenizer",
    "choose_tokenizer",
    "clip_tokenizer",
    "load_tokenizer",
    "pad",
    "save_tokenizer",
    "tokenizer_from_dict",
]
