"""What training on preferences shares for both models: pairs, their plan, scores, metrics."""
