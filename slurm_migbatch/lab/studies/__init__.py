"""Studies of papers' ideas on public data: what they measure is not what migbatchd runs, and has no bar of ours."""
