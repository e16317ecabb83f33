"""Training: optimizers, schedules, hidden states made on the fly, the loop and its resumable state."""
