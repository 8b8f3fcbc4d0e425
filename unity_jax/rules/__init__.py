"""Where the library of rewrite rules comes from: graphs are enumerated, paired by their values, proved and pruned.

What runs once, to make `rewrite/library.json`, and what judges anybody's rules; programs are rewritten by `rewrite`.
"""
