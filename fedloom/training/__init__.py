"""What one client computes: local training and evaluation."""
