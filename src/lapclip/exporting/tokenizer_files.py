"""Our tokenizers as the files that Hugging Face's libraries read, with the same ids."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.data.tokenizers import (
    WORD_END,
    WORDS,
    BytePairTokenizer,
    CharacterTokenizer,
    PretrainedTokenizer,
    SentencePieceTokenizer,
    SiglipTokenizer,
    Tokenizer,
    save_tokenizer,
)
from lapclip.errors import WeightsError, first_line
from lapclip.exporting.export_folder import write_json
from lapclip.suggest import install
from lapclip.weights import OWN_TOKENIZER, TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Theirs

START, END, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
"""What Hugging Face's CLIP calls the first two."""


def write_tokenizers(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """The tokenizer as others read it and, where that says less, as we do. Returns what theirs cannot express."""
    theirs, limits = others_tokenizer(tokenizer)
    save_others(theirs, folder)
    if type(tokenizer) is not PretrainedTokenizer:
        save_tokenizer(tokenizer, folder / OWN_TOKENIZER)
    return [
        f"tokenizer.json cannot express {limit}: captions without it give the same tokens."
        for limit in limits
    ]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> list[str]:
    """All files that Hugging Face's libraries look for. Returns what they cannot express."""
    made, limits = others_tokenizer(tokenizer)
    save_others(made, folder, pretty=True)
    own = isinstance(tokenizer, BytePairTokenizer) and tokenizer.own
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    if isinstance(tokenizer, SiglipTokenizer):
        names = {"eos_token": tokenizer.end, "pad_token": tokenizer.padding}
        special = {
            "unk_token": "<unk>",
            **{name: made.id_to_token(token) for name, token in names.items()},
        }
    if isinstance(tokenizer, CharacterTokenizer):
        special["unk_token"] = UNKNOWN
    described = {
        "tokenizer_class": "CLIPTokenizer" if own else "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    write_json(folder / "tokenizer_config.json", described, ascii=False)
    write_json(folder / "special_tokens_map.json", special, ascii=False)
    if isinstance(tokenizer, BytePairTokenizer) and own:  # the files that older releases know
        write_json(folder / "vocab.json", made.get_vocab(with_added_tokens=True), ascii=False)
        merges = "\n".join(" ".join(merge) for merge in tokenizer.merges)
        (folder / "merges.txt").write_text(
            f"#version: 0.2\n{merges}\n", encoding="utf-8", newline="\n"
        )
    return limits


def save_others(tokenizer: Theirs, folder: Path, *, pretty: bool = False) -> None:
    """Save a tokenizer of Hugging Face's library. Its own `save` raises a plain Exception on a full disk."""
    text = tokenizer.to_str(pretty=pretty)
    (folder / TOKENIZER).write_text(text, encoding="utf-8", newline="\n")


def others_tokenizer(tokenizer: Tokenizer) -> tuple[Theirs, list[str]]:
    """A tokenizer as Hugging Face's library has it, and what it cannot express."""
    from tokenizers import Tokenizer as Theirs

    match tokenizer:
        case BytePairTokenizer():
            return _byte_pairs(tokenizer), ["ftfy's mending of captions and HTML entities"]
        case CharacterTokenizer():
            return _characters(tokenizer), [
                "the Greek final sigma, which Python's lower case knows"
            ]
        case SiglipTokenizer():
            return _pieces(tokenizer)
        case PretrainedTokenizer():
            return Theirs.from_str(json.dumps(tokenizer.to_dict()["description"])), []
    raise WeightsError(
        f"A tokenizer of the kind {type(tokenizer).__name__} cannot be written for others."
    )


def _byte_pairs(tokenizer: BytePairTokenizer):
    """CLIP's steps: one space between words, lower case, the pattern of words, bytes as letters, merges."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    vocabulary = {token: at for at, token in enumerate(tokenizer.tokens)}
    vocabulary |= {START: tokenizer.start, END: tokenizer.end}
    merges = [(first, second) for first, second in tokenizer.merges]
    made = Theirs(
        models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix=WORD_END, unk_token=END)
    )
    made.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(WORDS.pattern), behavior="removed", invert=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, letters])  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return _framed(made, tokenizer)


def _characters(tokenizer: CharacterTokenizer):
    """Lower case, then a token a character."""
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    vocabulary = {character: at for at, character in enumerate(tokenizer.alphabet)}
    vocabulary |= {START: tokenizer.start, UNKNOWN: tokenizer.unknown, END: tokenizer.end}
    made = Theirs(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    made.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    each = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.pre_tokenizer = each  # pyright: ignore[reportAttributeAccessIssue]
    return _framed(made, tokenizer)


def _pieces(tokenizer: SiglipTokenizer) -> tuple[Theirs, list[str]]:
    """SigLIP's own, with the cleaning of captions as its first steps."""
    from tokenizers import Regex, normalizers
    from tokenizers import Tokenizer as Theirs

    limits = []
    if isinstance(tokenizer, SentencePieceTokenizer):
        made = _unigram(tokenizer)
        limits.append("letters with several accents, of which it drops some")
    else:
        made = Theirs.from_str(json.dumps(tokenizer.to_dict()["description"]))
    if tokenizer.cleaning:
        steps: list[normalizers.Normalizer] = []
        if tokenizer.cleaning != "mended":
            steps.append(normalizers.Lowercase())
            limits.append("the Greek final sigma, which Python's lower case knows")
        if tokenizer.cleaning == "mended-canonical":
            steps.append(normalizers.Replace("_", " "))
        if tokenizer.cleaning.endswith("canonical"):
            steps.append(normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""))
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        own = [made.normalizer] if made.normalizer else []
        made.normalizer = normalizers.Sequence([*steps, *own])  # pyright: ignore[reportAttributeAccessIssue]
    if tokenizer.cleaning.startswith("mended"):
        limits.append("ftfy's mending of captions and HTML entities")
    return made, limits


def _unigram(tokenizer: SentencePieceTokenizer) -> Theirs:
    """Return the pieces of a SentencePiece file as Hugging Face's library has them."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Theirs
    from tokenizers.processors import TemplateProcessing

    try:
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # without protobuf, or with a release that its classes do not fit
        raise WeightsError(
            f"tokenizer.json of SentencePiece's pieces needs the package protobuf: {first_line(error)}.",
            hint=install("towers"),
        ) from None
    messages: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    proto = messages.ModelProto.FromString(tokenizer.pieces)
    normalization, training = proto.normalizer_spec, proto.trainer_spec
    if training.model_type != training.UNIGRAM:
        raise WeightsError("Only SentencePiece's unigram models can be written as tokenizer.json.")
    pieces = proto.pieces[: tokenizer.vocabulary]
    special = [
        at for at, piece in enumerate(pieces) if piece.type in (piece.UNKNOWN, piece.CONTROL)
    ]
    unknown = next(at for at in special if pieces[at].type == pieces[at].UNKNOWN)
    made = Theirs(
        models.Unigram(
            [(piece.piece, piece.score) for piece in pieces], unknown, training.byte_fallback
        )
    )
    steps: list[normalizers.Normalizer] = []
    if normalization.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalization.precompiled_charsmap))
    if normalization.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex("^ +| +$"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    scheme = "always" if normalization.add_dummy_prefix else "never"
    made.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)]
    )
    made.add_special_tokens(
        [AddedToken(pieces[at].piece, special=True, normalized=False) for at in special]
    )
    made.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="$A </s>", special_tokens=[("</s>", tokenizer.end)]
    )
    return made


def _framed(made, tokenizer: Tokenizer):
    """With the start and the end token around each caption."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    made.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in (START, END)]
    )
    made.post_processor = TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, tokenizer.start), (END, tokenizer.end)]
    )
    return made
