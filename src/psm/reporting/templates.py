"""The jinja environment of all pages."""

from jinja2 import Environment, PackageLoader
from markupsafe import Markup


def template_environment() -> Environment:
    """Environment with the templates of ``reporting/templates`` and automatic escaping."""
    loader = PackageLoader("psm.reporting", "templates")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def template_source(environment: Environment, name: str) -> str:
    """The text of a template file, unrendered."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def joined_sources(environment: Environment, *names: str) -> Markup:
    """The texts of style sheets or scripts, one after the other, as they stand."""
    return Markup("\n".join(template_source(environment, name) for name in names))
