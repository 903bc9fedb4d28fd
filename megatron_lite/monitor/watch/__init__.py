"""Statistics of gradients, weights, updates and optimizer state (--watch)."""
