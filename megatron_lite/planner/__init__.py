"""Predict a run's memory and communication before it starts, and choose options from them."""
