"""`psm pretrain`: parse, call, print."""

from collections.abc import Sequence

from psm.config import merge as settings
from psm.config.schema import PretrainConfig as Config


def run(arguments: Sequence[str]) -> None:
    overrides = settings.parse(arguments, Config)
    settings.build(Config, *overrides)  # a mistyped key is answered before anything heavy is imported
    from psm.ops import keep_freed_memory
    from psm.reporting.run_page import write_page
    from psm.training.distributed import is_rank_zero
    from psm.training.pretrain import run_pretraining

    keep_freed_memory()
    result = run_pretraining(*overrides)
    if not is_rank_zero():
        return
    print(f"encoder: {result.out / 'encoder.safetensors'}")
    print(f"page:    {write_page(result.out, result.data)}")
    if result.data.test is not None:
        print(f"score:   psm evaluate {result.out}")
    else:  # without labels there is nothing to score by
        print(f"look:    psm explore {result.out}")
