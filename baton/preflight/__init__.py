"""`baton preflight`, in this order: `needs` renders the chart and says what it needs,
`cluster` reads what the cluster has, `checks` and `model` find what is missing.
"""
