"""Average precision against loops."""

from typing import Any

import pytest
import torch

from psm.evaluation.retrieval import average_precisions


def slow_average_precision(query: Any, label: Any, gallery: Any, labels: Any, skip: Any = None) -> Any:
    similarity = [float(torch.cosine_similarity(query, row, dim=0)) for row in gallery]
    order = sorted((i for i in range(len(gallery)) if i != skip), key=lambda i: -similarity[i])
    hits, total = 0, 0.0
    for rank, index in enumerate(order, start=1):
        if labels[index] == label:
            hits += 1
            total += hits / rank
    return total / hits if hits else None


@pytest.fixture
def data() -> Any:
    random = torch.Generator().manual_seed(0)
    return (
        torch.randn(40, 6, generator=random),
        torch.randint(4, (40,), generator=random),
        torch.randn(25, 6, generator=random),
        torch.randint(3, (25,), generator=random),
    )


def test_average_precision_over_a_gallery_equals_loops(data: Any) -> None:
    queries, query_labels, gallery, labels = data
    expected = [slow_average_precision(q, y, gallery, labels) for q, y in zip(queries, query_labels, strict=True)]
    expected = [value for value in expected if value is not None]
    assert len(expected) < 40  # queries of a class that the gallery lacks are left out
    assert average_precisions(queries, query_labels, gallery, labels).tolist() == pytest.approx(expected)


def test_a_query_does_not_find_itself(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, labels = data[:2]
    expected = [slow_average_precision(queries[i], labels[i], queries, labels, skip=i) for i in range(40)]
    assert average_precisions(queries, labels, queries, labels, leave_one_out=True).tolist() == pytest.approx(expected)
    monkeypatch.setattr("psm.evaluation.retrieval.MAX_SIMILARITIES", 40 * 7)  # in chunks
    assert average_precisions(queries, labels, queries, labels, leave_one_out=True).tolist() == pytest.approx(expected)


def test_separate_classes_are_found_without_a_mistake() -> None:
    labels = torch.arange(30) % 3
    features = torch.eye(3)[labels] + 0.01 * torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    assert average_precisions(features, labels, features, labels, leave_one_out=True).tolist() == [1.0] * 30
