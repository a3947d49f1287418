"""What the server computes: rounds, cohorts and the work that clients are given."""
