"""Methods as rows of parts, and how a configuration becomes one."""
