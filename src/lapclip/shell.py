"""Words as the user's shell takes them. What quotes a word in one shell is part of the word in another.

    sh            bash, zsh, dash and their kin, Git Bash on Windows among them
    fish          backslashes in its single quotes escape
    cmd           Windows' command prompt: double quotes, and a caret before what they do not keep
    powershell    Windows PowerShell 5.1: single quotes; double quotes in a word reach a program only with a backslash
    pwsh          PowerShell 7.3 and later, on any system: single quotes

Windows' programs are given one line and cut it into words themselves: https://learn.microsoft.com/cpp/c-language/parsing-c-command-line-arguments
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from functools import cache
from typing import Literal

Shell = Literal["sh", "fish", "cmd", "powershell", "pwsh"]

PROGRAMS: dict[str, Shell] = {
    "bash": "sh",
    "zsh": "sh",
    "ksh": "sh",
    "fish": "fish",
    "cmd": "cmd",
    "powershell": "powershell",
    "pwsh": "pwsh",
}
"""Shells that people type into, by their programs. `sh` is not among them: `make` and scripts start it in between."""
PLAIN = re.compile(r"[\w+=:./\\-]+", re.ASCII)
"""What no shell of Windows takes for anything but letters. PowerShell makes lists of what has commas."""

SINGLE_QUOTES, DOUBLE_QUOTES = "'\u2018\u2019\u201a\u201b", '"\u201c\u201d\u201e'
"""What PowerShell takes for quotes: those of typographers too."""


def quoted(word: str, shell: Shell | None = None) -> str:
    """A word as the shell, by default the user's, takes it for one word and changes nothing in it."""
    shell = shell or users_shell()
    if shell in ("sh", "fish"):
        return _in_fish(word) if shell == "fish" else _in_sh(word)
    if PLAIN.fullmatch(word):
        return word
    return _in_cmd(word) if shell == "cmd" else _in_powershell(word, old=shell == "powershell")


def program(path: str, shell: Shell | None = None) -> str:
    """A program by its path, as the first word of a line. PowerShell takes one in quotes for a text, unless it is told
    to call it."""
    shell = shell or users_shell()
    word = quoted(path, shell)
    return f"& {word}" if word != path and shell in ("powershell", "pwsh") else word


def set_variable(name: str, value: str, shell: Shell | None = None) -> str:
    """The line that sets an environment variable for the commands that follow."""
    shell = shell or users_shell()
    match shell:
        case "sh" | "fish":
            return f"export {name}={quoted(value, shell)}"
        case "cmd":
            return f'set "{name}={value}"'
        case _:
            return f"$env:{name} = {_text_in_powershell(value)}"


@cache
def users_shell() -> Shell:
    """The shell that this process was started from, however many programs are in between."""
    return shell_of(_ancestors(), windows=os.name == "nt", unix_tools="MSYSTEM" in os.environ)


def shell_of(programs: Iterable[str], *, windows: bool, unix_tools: bool = False) -> Shell:
    """The nearest shell among the programs that a process descends from, parents first. Where there is none, as for
    what a desktop starts, the system's usual one: cmd's double quotes are what PowerShell takes as well in most words.
    """
    names = (
        name.lower().removesuffix(".exe").lstrip("-") for name in programs
    )  # a login shell begins with a dash
    usual: Shell = "cmd" if windows and not unix_tools else "sh"
    found: list[Shell] = [PROGRAMS[name] for name in names if name in PROGRAMS]
    return found[0] if found else usual


def _ancestors() -> list[str]:
    import psutil  # not for a command that only prints its help

    try:
        return [parent.name() for parent in psutil.Process().parents()]
    except (psutil.Error, OSError):  # a process of somebody else, or one that has just ended
        return []


def _in_sh(word: str) -> str:
    if word.isprintable():
        return (
            f"'{word}'" if word.startswith("=") and "'" not in word else shlex.quote(word)
        )  # zsh: =ls is a path
    letters = (
        chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}"
        for byte in os.fsencode(word)
    )
    return f"$'{''.join(letters)}'"  # a name may hold a line break, or what would steer a terminal


def _in_fish(word: str) -> str:
    if word and shlex.quote(word) == word and not word.startswith("="):
        return word
    if word.isprintable():
        return "'" + re.sub(r"(['\\])", r"\\\1", word) + "'"
    return "".join(
        chr(b) if chr(b).isalnum() and b < 128 else f"\\X{b:02x}" for b in os.fsencode(word)
    )


def _in_cmd(word: str) -> str:
    """Nothing in it can be a line break: cmd has no way to type one."""
    text = f'"{_escaped(" ".join(word.splitlines()), in_quotes=True)}"'
    # A quote inside would end cmd's own quoting, and percent signs are read even in quotes: then a caret goes before
    # each sign that cmd knows, and it sees no quotes at all.
    return re.sub(r'([()%!^"<>&|])', r"^\1", text) if re.search(r'["%]', word) else text


def _in_powershell(word: str, *, old: bool) -> str:
    if not old:
        return _text_in_powershell(word)
    # 5.1 puts what has spaces into double quotes, escapes nothing, and leaves out what is empty.
    return _text_in_powershell(_escaped(word, in_quotes=re.search(r"\s", word) is not None) or '""')


def _text_in_powershell(text: str) -> str:
    if text.isprintable():
        return "'" + re.sub(f"([{SINGLE_QUOTES}])", r"\1\1", text) + "'"
    escaped = re.sub(f"([`${DOUBLE_QUOTES}])", r"`\1", text)
    return (
        '"' + "".join(one if one.isprintable() else f"$([char]{ord(one)})" for one in escaped) + '"'
    )


def _escaped(word: str, *, in_quotes: bool) -> str:
    """With a backslash before each double quote, and twice as many where some were there already, as Windows' programs
    read them; so also at the end, where a quote follows."""
    word = re.sub(r'(\\*)"', r'\1\1\\"', word)
    return re.sub(r"(\\+)$", r"\1\1", word) if in_quotes else word
