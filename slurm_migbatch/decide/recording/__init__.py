"""Recordings of decisions: written by migbatchd, decided again by `migbatch replay`."""
