"""The agent: works where the data lives, within the site's policy."""
