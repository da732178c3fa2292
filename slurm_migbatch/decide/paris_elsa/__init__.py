"""PARIS and ELSA (Kim et al., DAC 2022): what free GPUs are cut into, and which slice each work goes to."""
