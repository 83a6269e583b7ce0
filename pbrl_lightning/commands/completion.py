"""``pbrl completion``: a script that completes commands, options and class names in a shell.

jsonargparse can make one with shtab, but follows every class that an option may take, of which there are thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from jsonargparse import ArgumentParser

from pbrl_lightning.commands.parsing import ClearErrors

Shell = Literal["bash", "zsh"]
HELP = "Print the script that completes commands, options and class names in a shell."

_BASH = """\
# pbrl's completion for bash:  eval "$(pbrl completion bash)"
_pbrl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        words="{commands}"
    else
        case $before in
{values}
        esac
        if [[ -z $words && $current == -* ]]; then
            case ${{COMP_WORDS[1]}} in
{options}
            esac
        fi
    fi
    if [[ -n $words ]]; then COMPREPLY=($(compgen -W "$words" -- "$current")); fi
}}
complete -o default -F _pbrl pbrl
"""
_ZSH = """\
#compdef pbrl
# pbrl's completion for zsh:  eval "$(pbrl completion zsh)"
_pbrl() {{
    local found=""
    if (( CURRENT == 2 )); then
        found="{commands}"
    else
        case ${{words[CURRENT-1]}} in
{values}
        esac
        if [[ -z $found && ${{words[CURRENT]}} == -* ]]; then
            case ${{words[2]}} in
{options}
            esac
        fi
    fi
    if [[ -n $found ]]; then compadd -- ${{=found}}; else _files; fi
}}
compdef _pbrl pbrl
"""


def parser() -> ArgumentParser:
    """The command's options."""
    made = ClearErrors(
        prog="pbrl completion",
        usage="pbrl completion {bash,zsh}",
        description=HELP,
        epilog='eval "$(pbrl completion bash)", in ~/.bashrc for every shell',
    )
    made.add_argument("shell", type=Shell, help="Which shell.")
    return made


def script(shell: Shell, options: Mapping[str, Iterable[str]], values: Mapping[str, Iterable[str]]) -> str:
    """The completion script of a shell.

    Args:
        shell: Which shell.
        options: The options of each command.
        values: The values of options that take one of a few.

    Example:
        >>> print(script("bash", {"fit": ["--config"]}, {}).splitlines()[5])
                words="fit"
    """
    variable = "words" if shell == "bash" else "found"
    return (_BASH if shell == "bash" else _ZSH).format(
        commands=" ".join(options),
        options=_cases(options, variable, 4),
        values=_cases(values, variable, 3),
    )


def _cases(words: Mapping[str, Iterable[str]], variable: str, depth: int) -> str:
    indent = "    " * depth
    return "\n".join(f'{indent}{name}) {variable}="{" ".join(sorted(of))}" ;;' for name, of in words.items())
