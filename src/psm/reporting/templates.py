"""The one place that templates of pages are found in."""

from jinja2 import Environment, PackageLoader


def template_environment() -> Environment:
    """Templates of ``reporting/templates``; whatever is put into them is escaped."""
    loader = PackageLoader("psm.reporting", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
