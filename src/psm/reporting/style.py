"""Colours that colour-blind readers can tell apart, after Okabe and Ito."""

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"
