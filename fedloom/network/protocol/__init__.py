"""What both sides of the network share: messages, tensors, identities, fingerprints."""
