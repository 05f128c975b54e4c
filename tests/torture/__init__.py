"""The torture harness: `make torture`. What it does to psm, and what came of it, is in docs/reliability.md."""
