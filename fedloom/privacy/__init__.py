"""What stands between a client's answer and the server: secure aggregation and differential privacy."""
