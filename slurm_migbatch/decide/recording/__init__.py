"""Record decisions: written by migbatchd, repeated by `migbatch replay`."""
