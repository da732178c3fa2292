"""PARIS and ELSA (Kim et al., DAC 2022): partitioning of free GPUs, and assignment of work to slices."""
