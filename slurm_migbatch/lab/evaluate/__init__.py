"""Score the predictor on held-out models, compared with simple rules that have the same data."""
