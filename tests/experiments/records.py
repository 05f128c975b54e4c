"""Plans and records of runs that were not trained, with scores of our choosing."""

from typing import Any

from psm.experiments.plan import make_plan, read_request, resolved


def plan(*names: Any, **keys: Any) -> Any:
    return make_plan(read_request(names, keys))


def record_of(run: Any, linear: float, knn: float) -> dict[str, Any]:
    """A record as a worker writes it, with scores of our choosing."""
    scores = [
        {"of": run.method, "score": kind, "top1": x, "top5": 99.0} for kind, x in (("linear", linear), ("knn", knn))
    ]
    sizes = {"epochs": run.epochs, "batch_size": 32, "encoder": "tiny", "images": 115, "test_images": 13, "classes": 10}
    machine = {"psm": "0", "torch": "2", "threads": 1, "hardware": "a machine", "commit": "abc", "seconds": 60.0}
    about = {"run": run.name, "evaluation_hash": run.evaluation_hash, "title": run.title, "method": run.method}
    kept = {"evaluation": dict(run.evaluation), "config": resolved(run.settings), "curves": [], "date": "2024-01-01"}
    return about | sizes | machine | kept | {"data": "shapes", "seed": run.seed, "scores": scores}
