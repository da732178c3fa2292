"""Rewrite submissions: the pure rewrite and the socket service behind job_submit/lua."""
