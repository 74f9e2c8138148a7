"""ProteinMPNN and its fine-tuning by preferences: network, structures, pairs, designs."""
