"""Colors that color-blind readers can tell apart, after Okabe and Ito."""

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GRAY, BLACK = "#888888", "#222222"
