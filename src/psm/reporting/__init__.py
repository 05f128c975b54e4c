"""Tables in the terminal, pages for a browser."""
