"""Real federation: a coordinator, and agents on the machines where the data lives."""
