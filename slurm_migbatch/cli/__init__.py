"""The commands `migbatch` and `migacct`."""
