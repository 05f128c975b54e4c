"""`psm finetune`: parse, call, print."""

from collections.abc import Sequence

from psm.cli.arguments import with_positional
from psm.config import merge as settings
from psm.config.finetune import FinetuneConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(with_positional(arguments, "checkpoint"), Config)
    settings.build(Config, *overrides)  # a mistyped key is answered before anything heavy is imported
    from psm.finetuning.finetune import run_finetuning
    from psm.ops import keep_freed_memory
    from psm.reporting.finetune_page import write_page
    from psm.reporting.finetune_terminal import classifier_lines
    from psm.training.distributed import is_rank_zero

    keep_freed_memory()
    result = run_finetuning(*overrides)
    if not is_rank_zero():
        return
    for line in classifier_lines(result):
        print(line)
    print(f"page:       {write_page(result.out, result.data)}")
    print(f"predict:    psm predict checkpoint={result.out} data=FOLDER out=labels.csv")
