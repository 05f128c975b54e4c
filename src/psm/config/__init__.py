"""Settings: what a user may say, how it is merged and checked, and how it is shown."""
