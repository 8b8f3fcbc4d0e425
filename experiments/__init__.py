"""Programs about the library that are not part of it; each runs as `python -m experiments.GROUP.NAME` from the root.

`examples`: what a user would write; `tables`: the papers' tables, and sweeps; `validation`: what is predicted against
what is compiled and measured; `tools`: for whoever changes the library. Here is what they share: rows that are made
once (`rows`), the version of the code that made them (`made_by`), baselines (`baselines`, `padded`), and the page of
results (`summaries`, `readme`).
"""
