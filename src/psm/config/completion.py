"""Settings of `psm completion`."""

from dataclasses import dataclass

from psm.config.keys import key

SHELLS = ("bash", "zsh", "fish")


@dataclass
class CompletionConfig:
    """psm completion: a script that completes commands, keys, values and paths in your shell."""

    shell: str | None = key(None, "that reads the script; `psm completion bash` is short for it", choices=SHELLS)
    line: str | None = key(None, "print the completions of this line instead; the scripts call it")
