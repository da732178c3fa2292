"""Language models and other large public models: what they hold in memory and how fast a slice serves them."""
