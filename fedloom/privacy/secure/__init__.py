"""Secure aggregation: the server learns the sum of the clients' updates, and no update (Bonawitz et al. 2017)."""
