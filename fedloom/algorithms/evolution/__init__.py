"""Learning without gradients: a client tells how well candidates do on its examples, and nothing else."""
