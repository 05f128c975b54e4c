"""The jinja environment of all pages."""

from jinja2 import Environment, PackageLoader


def template_environment() -> Environment:
    """Environment with the templates of ``reporting/templates`` and automatic escaping."""
    loader = PackageLoader("psm.reporting", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def template_source(environment: Environment, name: str) -> str:
    """The text of a template file, unrendered."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
