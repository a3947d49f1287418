"""What coordinator and agents share: messages, parcels of tensors, signatures, certificates, code fingerprints."""
