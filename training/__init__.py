"""What every training script shares: the step, the run folder, the log, the command line."""
