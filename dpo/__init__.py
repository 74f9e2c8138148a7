"""ProteinMPNN trained on preferences: pairs, tables of mutations, plan, reference, evaluation."""
