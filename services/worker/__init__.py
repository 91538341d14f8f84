"""What the prefill and the decode worker share: the engine's thread, the store connector, the
handle, the heartbeat.
"""
