"""The autoscaler: how many prefill and decode workers there shall be, and why."""
