"""Learning without gradients: clients report only how well candidate models do on their examples."""
