"""ProteinMPNN: network, weights, scores of variants, settings of designs, pairs and batches."""
