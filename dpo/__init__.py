"""What training on preferences shares for both models: pairs, plan, Scorer, reference, metrics."""
