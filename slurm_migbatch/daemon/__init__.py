"""migbatchd: the one service on the controller host."""
