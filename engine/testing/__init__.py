"""Fakes and simulators for tests of the engine and of its users."""
