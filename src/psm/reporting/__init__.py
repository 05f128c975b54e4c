"""Reports: tables on the terminal and HTML pages."""
