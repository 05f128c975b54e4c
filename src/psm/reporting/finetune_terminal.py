"""What `psm finetune` and `psm predict` print."""

from collections.abc import Iterator

from psm.embedding.embed import UNREADABLE
from psm.finetuning.finetune import FinetuneResult
from psm.finetuning.predict import Prediction
from psm.finetuning.scores import PartScores

_SEEN = "; its own training images are among them, so this is too good"
SHOWN = 10  # unreadable images that are printed


def classifier_lines(result: FinetuneResult) -> Iterator[str]:
    """The classifier, its accuracy and its calibration."""
    best, last = result.best, result.last
    assert best is not None
    assert last is not None
    chosen = f"best of {last.epoch} epochs by validation: {best.epoch}" if best.validation else f"epoch {best.epoch}"
    yield f"classifier: {result.out / 'classifier.safetensors'} ({chosen})"
    for kind, part in (("validation", best.validation), ("test", best.test)):
        if part is not None:
            yield (
                f"accuracy:   {part.top1:.2f} % of {part.images:,} {kind} images (95 % interval {part.interval[0]:.1f} "
                f"to {part.interval[1]:.1f}), top-5 {part.top5:.2f} %"
            )
    if best.temperature is None:
        yield "calibrated: no, that takes validation images"
        return
    shown, kind = (best.test, "test") if best.test else (best.validation, "validation")
    assert shown is not None
    yield f"calibrated: temperature {best.temperature:.3f}; {_calibration(shown, kind)}"


def _calibration(part: PartScores, kind: str) -> str:
    before, after = part.uncalibrated, part.calibrated
    assert after is not None
    return (
        f"calibration error {before.ece:.1f} % -> {after.ece:.1f} %, NLL {before.nll:.3f} -> {after.nll:.3f} on the "
        f"{kind} images"
    )


def prediction_lines(found: Prediction) -> Iterator[str]:
    """The file, what was predicted most, what is known of its errors, and what could not be read."""
    for path, reason in found.unreadable[:SHOWN]:
        yield f"unreadable: {path}: {reason}"
    if found.unreadable:
        yield f"left out:   {len(found.unreadable):,} images, listed in {found.file}{UNREADABLE}"
    yield f"labels:     {found.file} ({found.images:,} image{'s' * (found.images != 1)})"
    ranked = sorted(zip(found.counts, found.classes, strict=True), reverse=True)[:5]
    yield "most often: " + ", ".join(f"{name} {100 * count / found.images:.1f} %" for count, name in ranked if count)
    if found.known:
        known = found.known
        low, high = known.interval
        yield (
            f"accuracy:   {known.top1:.2f} % of {known.images:,} labeled images (95 % interval {low:.1f} to "
            f"{high:.1f}), calibration error {known.ece:.1f} %{_SEEN if found.trained_on else ''}"
        )
    yield f"calibrated: {_stated_error(found)}"


def _stated_error(found: Prediction) -> str:
    """The calibration as it was measured when the classifier was trained."""
    for kind in ("test", "validation"):
        part = found.calibration.get(kind)
        if part and part["calibrated"]:
            return (
                f"temperature {found.calibration['temperature']:.3f}; after training the calibration error was "
                f"{part['calibrated']['ece']:.1f} % on {part['images']:,} {kind} images"
            )
    return "no: the classifier was trained without validation images, or its training is not finished"
