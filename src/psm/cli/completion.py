"""`psm completion`: a script for a shell, which asks `psm completion line=...` at each key press."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.cli.completing import candidates
from psm.config import merge as settings
from psm.config.completion import SHELLS
from psm.config.completion import CompletionConfig as Config
from psm.utils.errors import UserError

# Bash takes "=" for the end of a word: what stands before it in the last word is cut from each answer.
BASH = r"""_psm() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'
    local word="${line##* }" cut=""
    [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]] && cut="${word%"${word##*=}"}"
    COMPREPLY=($(psm completion line="$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace
}
complete -F _psm psm
"""

# A file of fpath is run as the function itself when it is first asked; read by `source`, it registers the function.
ZSH = r"""#compdef psm
_psm() {
    local -a found more whole
    found=("${(@f)$(psm completion line="$LBUFFER" 2>/dev/null)}")
    more=(${(M)found:#*[=./]})
    whole=(${found:#*[=./]})
    (( ${#more} )) && compadd -Q -S '' -- $more
    (( ${#whole} )) && compadd -Q -- $whole
}
if [[ "${funcstack[1]}" == _psm ]]; then _psm; else compdef _psm psm; fi
"""

FISH = r"""complete -c psm -f -a '(psm completion line=(commandline -cp | string collect) 2>/dev/null)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(arguments: Sequence[str]) -> None:
    if len(arguments) == 1 and arguments[0].startswith("line="):  # as it is: a line may hold anything
        from psm.cli.main import COMMANDS

        print("\n".join(candidates(arguments[0].removeprefix("line="), COMMANDS)))
        return
    config = settings.build(Config, *settings.parse(with_positional(arguments, "shell"), Config))
    if config.shell is None:
        raise UserError(f"`psm completion` needs a shell: {', '.join(SHELLS)}, for example `psm completion bash`.")
    print(SCRIPTS[config.shell], end="")
