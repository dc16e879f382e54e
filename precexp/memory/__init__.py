"""What a run's memory is made of. 1 MiB = 2^20 bytes."""
