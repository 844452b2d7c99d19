"""Quoting for shells: whatever a word holds, the program gets the same word.

bash is asked itself. cmd, PowerShell and the way in which Windows' programs cut their line into words are written here
a second time, after their documentation, because none of them can be run where this is developed;
`dev/platform_check.py` asks them on Windows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lapclip.shell import PROGRAMS, Shell, program, quoted, set_variable, shell_of
from tests.conftest import examples

WORDS = [
    "plain",
    "two words",
    "it's",
    "$HOME `x` *",
    "a\nb\x1b[31m",
    "caf\udce9",
    "[red]",
    "=ls",
    "~",
    "a,b",
    "#x",
    "",
]
SIGNS = st.text(
    st.sampled_from("ab 01\\\"'%^&|<>()!$`,;=~-_./:{}[]*?#@\t\u2018\u2019\u201c\u201dé"),
    max_size=12,
)


@pytest.mark.skipif(sys.platform == "win32", reason="bash is asked")
@pytest.mark.parametrize("word", WORDS)
def test_a_shell_takes_a_quoted_word_as_it_is(word: str) -> None:
    for shell in filter(shutil.which, ("bash", "zsh", "fish")):
        said = subprocess.run(
            [shell, "-c", f"printf %s {quoted(word, PROGRAMS[shell])}"],
            capture_output=True,
            check=True,
        )
        assert said.stdout == word.encode("utf-8", "surrogateescape"), shell
        assert quoted(word, PROGRAMS[shell]).isprintable()


def argv(line: str) -> list[str]:
    """The words that a program of Windows finds in its line."""
    words, at = [], 0
    while (at := re.compile(r"[ \t]*").match(line, at).end()) < len(line):  # type: ignore[union-attr]
        word, inside = "", False
        while at < len(line) and (inside or line[at] not in " \t"):
            slashes = re.compile(r"\\*").match(line, at).group()  # type: ignore[union-attr]
            at += len(slashes)
            if line[at : at + 1] != '"':
                word += slashes
                if slashes:
                    continue
                word, at = word + line[at], at + 1
            else:
                word += "\\" * (len(slashes) // 2)
                if len(slashes) % 2:
                    word += '"'
                else:
                    inside = not inside
                at += 1
        words.append(word)
    return words


def through_cmd(typed: str) -> str:
    """The line that cmd hands on. Variables in percent signs that it knows would be replaced: it knows those of one or
    two letters here, and `LAST` with any sign after it."""
    line = re.sub(r"%([a-zA-Z0-9]{1,2})%", "REPLACED", typed)
    found, inside, at = "", False, 0
    while at < len(line):
        if line[at] == "^" and not inside:
            at += 1
        elif line[at] == '"':
            inside = not inside
        else:
            assert inside or line[at] not in "&|<>()", f"cmd acts on {line[at]}"
        found, at = found + line[at : at + 1], at + 1
    return found


def through_powershell(typed: str, *, old: bool) -> list[str]:
    """The words that a program gets from a line of one word, in 5.1 or in 7.3 and later."""
    quote, other = "['\u2018\u2019\u201a\u201b]", "[^'\u2018\u2019\u201a\u201b]"
    if re.match(quote, typed):
        body = re.fullmatch(f"{quote}((?:{other}|{quote}{quote})*){quote}", typed)
        assert body, f"not one text: {typed}"
        word = re.sub(f"({quote}){quote}", r"\1", body[1])
    elif typed.startswith('"'):
        body = re.fullmatch(r'"((?:[^"\u201c\u201d\u201e`$]|`.|\$\(\[char\]\d+\))*)"', typed)
        assert body, f"not one text: {typed}"
        word = re.sub(
            r"\$\(\[char\](\d+)\)|`(.)", lambda m: chr(int(m[1])) if m[1] else m[2], body[1]
        )
    else:
        assert re.fullmatch(r"[\w+=:./\\-]+", typed, re.ASCII)
        word = typed
    if not old:
        return [word]  # handed over as it is
    return argv(f'"{word}"' if re.search(r"\s", word) else word)


@settings(max_examples=examples(300))
@given(SIGNS)
@example('say "x" & y')
@example("100% of %TEMP%, %a%")
@example("C:\\my photos\\")
@example("")
def test_windows_shells_give_a_program_the_word_as_it_is(word: str) -> None:
    assert argv(through_cmd(quoted(word, "cmd"))) == [word]
    assert through_powershell(quoted(word, "powershell"), old=True) == [word]
    assert through_powershell(quoted(word, "pwsh"), old=False) == [word]


@pytest.mark.parametrize("word", ["a\nb", "\x1b[31m", "x\x00$(y)`"])
def test_powershell_can_type_what_cannot_be_printed_and_cmd_shows_a_space(word: str) -> None:
    assert through_powershell(quoted(word, "pwsh"), old=False) == [word]
    assert quoted(word, "pwsh").isprintable()
    assert quoted("a\nb", "cmd") == '"a b"'


@pytest.mark.parametrize(
    ("word", "cmd", "powershell"),
    [
        ("C:\\photos\\2024", "C:\\photos\\2024", "C:\\photos\\2024"),
        ("C:\\my photos", '"C:\\my photos"', "'C:\\my photos'"),
        ("a|b & c", '"a|b & c"', "'a|b & c'"),
        ("work.ask=it's", '"work.ask=it\'s"', "'work.ask=it''s'"),
    ],
)
def test_usual_words_look_usual(word: str, cmd: str, powershell: str) -> None:
    assert (quoted(word, "cmd"), quoted(word, "pwsh"), quoted(word, "powershell")) == (
        cmd,
        powershell,
        powershell,
    )


@pytest.mark.parametrize(
    ("programs", "windows", "shell"),
    [
        (["make", "sh", "zsh", "login"], False, "sh"),
        (["-fish", "tmux: server"], False, "fish"),
        (["sh", "make", "fish", "bash"], False, "fish"),
        (["pwsh", "bash"], False, "pwsh"),
        (["cron"], False, "sh"),
        (["lapclip.exe", "cmd.exe", "explorer.exe"], True, "cmd"),
        (["lapclip.exe", "powershell.exe", "WindowsTerminal.exe"], True, "powershell"),
        (["python.exe", "PWSH.EXE"], True, "pwsh"),
        (["bash.exe", "mintty.exe"], True, "sh"),
        (["explorer.exe"], True, "cmd"),
        ([], True, "cmd"),
    ],
)
def test_the_nearest_shell_is_the_users(programs: list[str], windows: bool, shell: Shell) -> None:
    assert shell_of(programs, windows=windows) == shell
    assert shell_of([], windows=True, unix_tools=True) == "sh"


def test_a_program_in_quotes_is_called_in_powershell() -> None:
    assert program("C:\\my env\\lapclip.exe", "powershell") == "& 'C:\\my env\\lapclip.exe'"
    assert program(".venv\\Scripts\\lapclip.exe", "pwsh") == ".venv\\Scripts\\lapclip.exe"
    assert program("C:\\my env\\lapclip.exe", "cmd") == '"C:\\my env\\lapclip.exe"'
    assert program("my env/bin/lapclip", "sh") == "'my env/bin/lapclip'"


def test_a_variable_is_set_as_each_shell_does() -> None:
    assert set_variable("LAPCLIP_TRUST", "a b:c", "sh") == "export LAPCLIP_TRUST='a b:c'"
    assert set_variable("LAPCLIP_TRUST", "a b:c", "cmd") == 'set "LAPCLIP_TRUST=a b:c"'
    assert set_variable("LAPCLIP_TRUST", "a'b", "pwsh") == "$env:LAPCLIP_TRUST = 'a''b'"
