"""Questions of users: typed values, what may be told to whom, answers, and who serves them."""
