"""How well the predictor does on models that it has not seen, beside simple rules that know as much."""
