"""User queries: typed values, access rights, answers, and the service that gives them."""
