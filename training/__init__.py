"""What every training script shares: command line, config, step, run folder, resume, log."""
