"""The submit filter: the pure rewrite and the socket service behind job_submit/lua."""
