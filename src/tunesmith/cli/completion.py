"""Print a completion script: `source <(tunesmith completion bash)`."""

from __future__ import annotations

import argparse

from tunesmith.cli.main import list_verbs, load_verb, make_parser

_BASH = """\
# tunesmith completion for bash: source <(tunesmith completion bash)
_tunesmith() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{verbs} --help --version"
  elif [[ "$current" == -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _tunesmith tunesmith
"""

_ZSH = """\
#compdef tunesmith
# tunesmith completion for zsh: source <(tunesmith completion zsh)
autoload -U +X bashcompinit && bashcompinit
{bash}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="Shell to write for.")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    flags = {verb: list_flags(verb) for verb in list_verbs()}
    print(_fish(flags) if args.shell == "fish" else _bash(flags, zsh=args.shell == "zsh"), end="")
    return 0


def list_flags(verb: str) -> dict[str, str]:
    """The visible flags of a verb with their help."""
    parser = make_parser(verb, load_verb(verb))
    return {
        flag: str(action.help or "")
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for flag in action.option_strings
        if flag.startswith("--")
    }


def _bash(flags: dict[str, dict[str, str]], *, zsh: bool) -> str:
    cases = "\n".join(f'      {verb}) words="{" ".join(sorted(names))}" ;;' for verb, names in flags.items())
    script = _BASH.format(verbs=" ".join(flags), cases=cases)
    return _ZSH.format(bash=script) if zsh else script


def _fish(flags: dict[str, dict[str, str]]) -> str:
    lines = ["# tunesmith completion for fish: tunesmith completion fish | source"]
    for verb, text in list_verbs().items():
        lines.append(f"complete -c tunesmith -n __fish_use_subcommand -a {verb} -d {_fish_text(text)}")
    for verb, names in flags.items():
        for flag, text in names.items():
            seen = f"'__fish_seen_subcommand_from {verb}'"
            lines.append(f"complete -c tunesmith -n {seen} -l {flag[2:]} -d {_fish_text(text.replace('%%', '%'))}")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
