"""Colors that color-blind readers can tell apart, after Okabe and Ito."""

BLUE, ORANGE, GREEN, GRAY, BLACK = "#0072B2", "#D55E00", "#009E73", "#888888", "#222222"
