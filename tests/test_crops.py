"""Crop and colours in one pass: the views that torch's functions make, and taken only where it applies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psm import crops, processor
from psm.augment import Views
from psm.config import ViewsConfig

compiled = pytest.mark.skipif(processor.lanes() is None, reason="nothing is compiled for this processor")
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def pictures_of(count, height, width):
    draws = torch.Generator().manual_seed(count + height)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=draws)


def made(views, pictures, way=None, channels_last=False, draws=None):
    """Views, by torch's functions if ``way`` is False."""
    draws = draws or views.draw(len(pictures), torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as changed:
        if way is False:
            changed.setattr(crops, "apply_to", lambda *given: False)
        return views.apply(pictures, draws, channels_last=channels_last)


@compiled
@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.integers(1, 40),
    later=st.sampled_from([{}, {"blur": 0.5}, {"solarise": 0.5}, {"blur": 0.5, "solarise": 0.5}]),
    crop=st.sampled_from([[0.05, 1.0], [0.2, 1.0], [1.0, 1.0]]),
    channels_last=st.booleans(),
    threads=st.integers(1, 3),
)
def test_views_are_those_of_torch(count, height, width, size, later, crop, channels_last, threads):
    views = Views(ViewsConfig(size=size, crop=crop, **({"blur": 0.0} | later)), size, MEAN, STD)
    pictures, before = pictures_of(count, height, width), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert crops.apply_to(pictures, size)
        found = made(views, pictures, channels_last=channels_last)
    finally:
        torch.set_num_threads(before)
    expected = made(views, pictures, False, channels_last)
    assert found.stride() == expected.stride()
    near = (found - expected).abs() < 2e-4
    if "solarise" in later:  # a value in the middle may round to either side, and be inverted or not
        assert near.float().mean() > 0.99
    else:
        assert near.all()


@compiled
def test_most_of_a_large_picture_goes_into_a_small_view():
    """Every pixel counts: many of them for each place."""
    views = Views(ViewsConfig(size=3, crop=[0.9, 1.0], ratio=[0.5, 2.0], blur=0.0), 3, MEAN, STD)
    pictures = pictures_of(4, 700, 513)
    torch.testing.assert_close(made(views, pictures), made(views, pictures, False), atol=2e-4, rtol=0)


@compiled
def test_a_picture_s_view_does_not_depend_on_its_company_or_on_threads():
    """Bit for bit, whoever comes first: or processes that share a batch would not share its views."""
    views, pictures = Views(ViewsConfig(), 32, MEAN, STD), pictures_of(40, 32, 32)
    draws, before, found = views.draw(40, torch.Generator().manual_seed(1)), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            found.append(made(views, pictures, draws=draws))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(again, found[0]) for again in found[1:])
    assert torch.equal(made(views, pictures[7:19], draws=draws[7:19]), found[0][:, 7:19])


@compiled
def test_neither_default_type_nor_device_changes_it():
    views, pictures = Views(ViewsConfig(), 32, MEAN, STD), pictures_of(4, 32, 32)
    draws = views.draw(4, torch.Generator().manual_seed(1))
    expected = made(views, pictures, draws=draws)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert torch.equal(made(views, pictures, draws=draws), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_pictures_go_by_torch(monkeypatch):
    monkeypatch.setattr(crops, "make", None)
    views, pictures = Views(ViewsConfig(), 32, MEAN, STD), pictures_of(4, 32, 32)
    assert not crops.apply_to(pictures.to("meta"), 32)
    assert not crops.apply_to(pictures[:0], 32)
    assert not crops.apply_to(pictures, 5000)
    monkeypatch.setattr(processor, "_native", None)
    processor.lanes.cache_clear()
    try:
        assert made(views, pictures).shape == (2, 4, 3, 32, 32)
    finally:
        processor.lanes.cache_clear()


@compiled
def test_it_is_taken(monkeypatch):
    taken, whole = [], crops.make
    monkeypatch.setattr(crops, "make", lambda *given: taken.append(len(given[1])) or whole(*given))
    made(Views(ViewsConfig(), 32, MEAN, STD), pictures_of(300, 32, 32))
    assert taken == [300]
