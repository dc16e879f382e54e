"""What a run's memory is made of. Words and units: DESIGN section 8; 1 MiB = 2^20 bytes."""
