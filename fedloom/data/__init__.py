"""Which client holds which examples: sources, partitions, splits and the federation they make."""
