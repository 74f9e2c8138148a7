"""What both models stand on: letters, sequence files, structures, mutations, tables, scores."""
