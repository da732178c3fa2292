"""Study ideas from papers on public data: migbatchd does not use the measured rules, so there are no targets."""
